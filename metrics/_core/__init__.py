"""The core that all metrics share, from the lowest layer to the highest.

1. `evaluation`: what the Trainer passes to `compute_metrics`, as NumPy arrays with one row per sample.
2. `keys`: names of scores: which the Trainer reserves, and which entry of a table a name belongs to.
3. `arguments`: checks of arguments.
4. `order`: whether the samples are in the order of the dataset.
5. `metric`: `Metric`, which computes columns per sample, sums them and scores the sums.
6. `build`: metrics made of other metrics: `build`, `with_labels_from`, `by_dataset`.
7. `classes`: class names, class ids, probabilities and counts, for the metrics of classes.
8. `confusion`: scores that follow from counts per class.
"""
