"""The kernel and the parts that all losses share, one idea per file.

The flow of `causal_lm_loss`, in which each module appears once:

1. `checks` raises errors that name the option, label or logit at fault, before any work.
2. `alignment` finds the logits among the outputs and pairs each label with the row of logits that predicts it.
3. `sources` provides the logits, or the hidden states and the head that `hidden` reads from the model.
4. `units` weights the labels of a sequence, if the loss divides by sequences.
5. `normalization` turns `num_items_in_batch` into the count, and divides by it at the end.
6. `signature` reads which statistics, labels and extras the term asks for; `combined` does so for sums of terms.
7. `term_loss` binds the term to the batch and runs it over the chunks.
8. `rows` cuts the scored rows into chunks that stay in cache.
9. `block` computes the statistics of a chunk, and the gradient of its logits from their derivatives.
10. `autograd` wraps torch's private functions that forward and backward use.
11. `recorder` passes statistics on to `watch()`; `columns` defines the quantities that are summed over labels.

Hidden states go through `head`, whose matrix products are in `head_products`. Distributions over labels go through
`soft_labels`, and comparisons with a teacher through `teacher`.
"""
