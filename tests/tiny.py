"""Tiny models, ragged data, collators and Trainers for every test that runs the real Trainer.

Everything is deterministic, on the CPU and without dropout. A Trainer from `trainer` makes plain SGD steps with a
learning rate of 1 and no clipping, so that parameters before minus after is the gradient of the step.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch.nn.parallel import scatter_gather

VOCAB = 64
PAD = 0
MASK = 3
HIDDEN = 32
LONGEST = 64
IGNORED = -100

Row = dict[str, torch.Tensor]

_SCRATCH = tempfile.TemporaryDirectory(prefix="lossfns-tests-")
_REPOSITORY = Path(__file__).resolve().parent.parent

# The Trainer collects garbage before each run, which is nine tenths of the time of a tiny one (0.4 of 0.45 s), most of
# it spent on what the imports made and nobody will ever free.
transformers.Trainer  # noqa: B018  (the import is lazy)
gc.freeze()

# --- models ----------------------------------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.2,
}
_TOKENS = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _SIZES | _TOKENS | {"num_key_value_heads": 2, "attention_dropout": 0.0}
_ENCODER = _SIZES | {"pad_token_id": PAD, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = _TOKENS | {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LONGEST,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": HIDDEN,
    "num_layers": 1,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": PAD,
    "eos_token_id": 2,
    "decoder_start_token_id": PAD,
}
_BART = _TOKENS | {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
    "max_position_embeddings": LONGEST,
    "init_std": 0.2,
    "dropout": 0.0,
    "decoder_start_token_id": PAD,
    "forced_eos_token_id": None,
}
_VIT = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}

# name: (model class, config class, config)
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        # Eager experts: the fused ones know no float64.
        _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _DECODER | {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", _DECODER | {"logit_scale": 0.25}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", _DECODER | {"logits_scaling": 4.0}),
    "llama_cls": ("LlamaForSequenceClassification", "LlamaConfig", _DECODER | {"num_labels": 3}),
    "bert_mlm": ("BertForMaskedLM", "BertConfig", _ENCODER),
    "bert_cls": ("BertForSequenceClassification", "BertConfig", _ENCODER | {"num_labels": 3}),
    "bert_token": ("BertForTokenClassification", "BertConfig", _ENCODER | {"num_labels": 3}),
    "bert_choice": ("BertForMultipleChoice", "BertConfig", _ENCODER),
    "bert_qa": ("BertForQuestionAnswering", "BertConfig", _ENCODER),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
    "vit": ("ViTForImageClassification", "ViTConfig", _VIT),
}


def model(
    name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any
) -> transformers.PreTrainedModel:
    """One of `_MODELS` with random weights that depend on `seed` alone; `config` overrides its configuration."""
    model_class, config_class, defaults = _MODELS[name]
    settings = getattr(transformers, config_class)(**(defaults | config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, model_class)(settings).to(dtype)


# --- rows ------------------------------------------------------------------------------------------------------------


def _ragged_ids(n: int, seed: int) -> tuple[torch.Generator, list[torch.Tensor]]:
    """`n` rows of 4 to 12 ids, none of them special, and the generator that goes on from there."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 13, (n,), generator=generator).tolist()
    return generator, [torch.randint(4, VOCAB, (length,), generator=generator) for length in lengths]


def _row(ids: torch.Tensor, **targets: torch.Tensor) -> Row:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **targets}


def lm_rows(n: int, seed: int = 0, *, prompt: bool = True) -> list[Row]:
    """Ragged causal or seq2seq rows; the labels are the ids, with -100 over a prompt of 1 to 3 tokens if `prompt`."""
    generator, rows = _ragged_ids(n, seed)
    prompts = torch.randint(1, 4, (n,), generator=generator).tolist()
    labels = [ids.clone() for ids in rows]
    for target, length in zip(labels, prompts, strict=True):
        target[: length if prompt else 0] = IGNORED
    return [_row(ids, labels=target) for ids, target in zip(rows, labels, strict=True)]


def masked_rows(n: int, seed: int = 0) -> list[Row]:
    """Ragged masked-LM rows: every third token is MASK and has a label, the others have -100."""
    _, rows = _ragged_ids(n, seed)
    masks = [torch.arange(len(ids)) % 3 == 1 for ids in rows]
    return [
        _row(ids.masked_fill(mask, MASK), labels=ids.masked_fill(~mask, IGNORED))
        for ids, mask in zip(rows, masks, strict=True)
    ]


def token_rows(n: int, seed: int = 0, *, num_labels: int = 3) -> list[Row]:
    """Ragged token-classification rows; the first and the last token have no label."""
    _, rows = _ragged_ids(n, seed)
    labels = [ids % num_labels for ids in rows]
    for target in labels:
        target[[0, -1]] = IGNORED
    return [_row(ids, labels=target) for ids, target in zip(rows, labels, strict=True)]


def class_rows(n: int, seed: int = 0, *, num_labels: int = 3) -> list[Row]:
    """Ragged rows with one class id each."""
    _, rows = _ragged_ids(n, seed)
    return [_row(ids, labels=ids.sum() % num_labels) for ids in rows]


def qa_rows(n: int, seed: int = 0) -> list[Row]:
    """Ragged rows with a start and an end position each."""
    _, rows = _ragged_ids(n, seed)
    return [_row(ids, start_positions=torch.tensor(1), end_positions=torch.tensor(len(ids) - 1)) for ids in rows]


def image_rows(n: int, seed: int = 0, *, num_labels: int = 3) -> list[Row]:
    """Random 8 x 8 images with one class id each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "pixel_values": torch.randn(3, 8, 8, generator=generator, dtype=torch.float64),
            "labels": torch.randint(num_labels, (), generator=generator),
        }
        for _ in range(n)
    ]


def count(rows: Sequence[Row], *, shift: int = 0) -> int:
    """The number of labels of `rows` that are not -100, without the first `shift` labels of each row."""
    return sum(int((row["labels"][shift:] != IGNORED).sum()) for row in rows)


# --- collators (picklable functions) ---------------------------------------------------------------------------------


def pad(rows: Sequence[Row], *, side: str = "right") -> Row:
    """Stack rows of any task; 1-D tensors are padded at `side`, labels with -100, the others with 0."""
    return {name: _stack([row[name] for row in rows], IGNORED if name == "labels" else 0, side) for name in rows[0]}


def pad_left(rows: Sequence[Row]) -> Row:
    """`pad` at the left, as generation and reward models want it."""
    return pad(rows, side="left")


def pad_seq2seq(rows: Sequence[Row]) -> Row:
    """`pad`, and the `decoder_input_ids` that a seq2seq model whose labels the Trainer pops cannot make itself."""
    batch = pad(rows)
    shifted = batch["labels"].roll(1, dims=1)
    shifted[:, 0] = PAD
    return batch | {"decoder_input_ids": shifted.masked_fill(shifted == IGNORED, PAD)}


def _stack(tensors: list[torch.Tensor], value: int, side: str) -> torch.Tensor:
    if tensors[0].dim() != 1:
        return torch.stack(tensors)
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


# --- Trainers --------------------------------------------------------------------------------------------------------


# What sorts rows of one length together, by its name up to transformers 4.57 and since.
GROUPED: dict[str, Any] = (
    {"train_sampling_strategy": "group_by_length"}
    if hasattr(transformers.TrainingArguments, "train_sampling_strategy")
    else {"group_by_length": True}
)


def arguments(**changes: Any) -> transformers.TrainingArguments:
    """Training arguments for plain SGD on the CPU that writes nothing; `changes` override them."""
    # Up to 4.57 bf16=True and torch_compile=True stay in the environment and reach every later Trainer of the process.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    settings = {
        "output_dir": tempfile.mkdtemp(dir=_SCRATCH.name),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    kind = changes.pop("arguments_class", transformers.TrainingArguments)
    return kind(**(settings | changes))


def trainer(
    model: torch.nn.Module,
    rows: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    reducer: Callable[..., Any] | None = None,
    metric: Callable[..., dict[str, float]] | None = None,
    collator: Callable[[Sequence[Row]], Any] = pad,
    eval_rows: Any = None,
    replicas: int = 1,
    trainer_class: type[transformers.Trainer] = transformers.Trainer,
    callbacks: list[transformers.TrainerCallback] | None = None,
    **training_arguments: Any,
) -> transformers.Trainer:
    """A stock Trainer over the three hooks; with `replicas` > 1 over `CpuDataParallel`, a batch for each replica."""
    args = arguments(**training_arguments)
    if replicas > 1:
        args._n_gpu = replicas
    made = trainer_class(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=eval_rows,
        data_collator=collator,
        compute_loss_func=loss,
        preprocess_logits_for_metrics=reducer,
        compute_metrics=metric,
        callbacks=callbacks,
    )
    made.remove_callback(transformers.PrinterCallback)
    if replicas > 1:
        made._wrap_model = lambda model, training=True, dataloader=None: CpuDataParallel(model, replicas)
    return made


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every trainable parameter, float64, by name."""
    return {name: p.detach().double().clone() for name, p in model.named_parameters() if p.requires_grad}


def parameters_after(trainer: transformers.Trainer) -> dict[str, torch.Tensor]:
    """Train, then `parameters` of the model."""
    trainer.train()
    return parameters(trainer.model)


def gradient_of(trainer: transformers.Trainer) -> torch.Tensor:
    """Train, then parameters before minus after in one float64 vector: the gradient, when that was one step."""
    before = parameters(trainer.model)
    after = parameters_after(trainer)
    return torch.cat([(before[name] - after[name]).flatten() for name in before])


def logged(trainer: transformers.Trainer, key: str = "loss") -> list[float]:
    """Every value that the Trainer logged under `key`, in order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# --- several devices -------------------------------------------------------------------------------------------------


class CpuDataParallel(torch.nn.DataParallel):
    """DataParallel under torch's own scatter and gather rules, on a CPU: the replicas are the module, one by one."""

    def __init__(self, module: torch.nn.Module, replicas: int = 2) -> None:
        super().__init__(module)
        self.replicas = replicas

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with mock.patch.multiple(scatter_gather, Scatter=_CpuScatter, Gather=_CpuGather):
            shares = scatter_gather.scatter_kwargs(inputs, kwargs, list(range(self.replicas)))
            outputs = [self.module(*args, **options) for args, options in zip(*shares, strict=True)]
            return scatter_gather.gather(outputs, target_device=0) if len(outputs) > 1 else outputs[0]


class _CpuScatter:
    @staticmethod
    def apply(devices: list[int], chunk_sizes: None, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.chunk(len(devices), dim)


class _CpuGather:
    @staticmethod
    def apply(device: int, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors, dim)


_EPILOGUE = """
import json, os, pathlib
pathlib.Path({folder!r}, os.environ["RANK"]).write_text(json.dumps(result))
"""


def run_distributed(job: str | Callable[[], Any], nproc: int = 2, *, timeout: float = 120) -> list[Any]:
    """Run `job` on `nproc` gloo ranks under torchrun and return its result from each rank, through JSON.

    `job` is a module-level function without arguments, or the text of a script that leaves its answer in `result`.
    """
    if not isinstance(job, str):
        job = f"from {job.__module__} import {job.__qualname__} as job\nresult = job()\n"
    folder = Path(tempfile.mkdtemp(dir=_SCRATCH.name))
    script = folder / "job.py"
    script.write_text(job + _EPILOGUE.format(folder=str(folder)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    process = subprocess.Popen(
        [*command, f"--nproc-per-node={nproc}", str(script)],
        cwd=_REPOSITORY,
        env=_distributed_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks, which a kill would leave running
        raise AssertionError(f"{nproc} ranks did not finish in {timeout} s:\n{process.communicate()[0]}") from None
    assert process.returncode == 0, output
    return [json.loads((folder / str(rank)).read_text()) for rank in range(nproc)]


def _distributed_environment() -> Mapping[str, str]:
    path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
