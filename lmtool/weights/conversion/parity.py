"""Open an exported folder with transformers and compare it with its checkpoint: weights, logits, predictions.

Shape letters: B rows, L their padded length in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from lmtool.config.saved import JsonMapping
from lmtool.data.configs import FORMATS
from lmtool.data.examples import Examples, Rows
from lmtool.data.formats import FormatTemplate, text_format
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_configs import BigbirdConfig
from lmtool.session.trained import has_segments
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.texts import InputFormat, SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch
from lmtool.weights.comparing import CheckpointComparison, quiet_transformers, relative_difference, tokenized
from lmtool.weights.exporting import TokenizerSettings
from lmtool.weights.folders import read_settings
from lmtool.weights.padded_model import LoadedCheckpoint, PaddedModel
from lmtool.weights.saved_model import CheckpointModel, format_of
from lmtool.weights.task_heads import CHOICES, head_of_class

PARITY = 1e-4
"""Tolerance between the implementations, relative to the largest value, or to 1 if that is larger."""
_LONGEST, _SHORTEST, _DECODER = 24, 4, 7


@dataclass(frozen=True)
class Parity:
    """The comparison of an exported folder in transformers with its checkpoint. Only this detects a key map that is
    wrong in both directions.

    Attributes:
        library: transformers and its version; None if it is not installed.
        architecture: The class that opened the folder; None if transformers lacks it.
        errors: Tensors that the class does not expect, or why it cannot open the folder.
        initialized: Tensors that the file lacks and transformers initializes, such as a pooler.
        differences: Largest relative difference of each output.
    """

    library: str | None
    architecture: str | None = None
    errors: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()
    differences: Mapping[str, float] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether no difference was found; also true if nothing was compared."""
        return not self.errors and all(number < PARITY for number in self.differences.values())

    def row(self) -> tuple[str, str]:
        """Label and value for the screen."""
        label = "opened by"
        if self.library is None:
            return label, "lmtool only: not compared, transformers is not installed"
        if self.architecture is None:
            return label, f"lmtool only: {self.library} has no such class"
        initialized = ""
        if self.initialized:
            initialized = f", which initializes missing tensors: {', '.join(self.initialized[:4])}"
        errors = f" · {'; '.join(self.errors[:4])}" if self.errors else ""
        each = ", ".join(f"{name} {number:.3g}" for name, number in self.differences.items()) or "not known"
        return label, f"{self.library} as {self.architecture}{initialized}{errors} · largest differences: {each}"


@torch.no_grad()
def parity(folder: Path, architecture: str, original: CheckpointModel, tokenizer: Tokenizer) -> Parity:
    """Open an exported folder with transformers, and compare its outputs for random ids with the checkpoint's.

    Args:
        folder: The exported folder.
        architecture: The transformers class in its config.json.
        original: The checkpoint's model.
        tokenizer: The exported tokenizer.
    """
    try:
        import transformers as library

        model_class = getattr(library, architecture, None)
    except (ImportError, RuntimeError):  # transformers raises RuntimeError for modules that cannot be imported
        return Parity(None)
    name = f"transformers {library.__version__}"
    if model_class is None:
        return Parity(name)
    model = original.backbone.config
    rows = sample(model, tokenizer)
    if original.task is not None:  # the decoder reads the same text
        rows.pop("decoder_input_ids", None)
    actual = PaddedModel(original, tokenizer.roles.get(model.start_role or "")).eval()(**rows)
    try:
        with quiet_transformers():
            reference, report = model_class.from_pretrained(folder, output_loading_info=True, local_files_only=True)
            outputs = _outputs(reference.eval(), architecture, rows)
    except Exception as error:  # transformers raises many kinds of errors
        return Parity(name, architecture, (f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",))
    unexpected = [
        f"{kind.removesuffix('_keys')} {key if isinstance(key, str) else key[0]}"
        for kind in ("unexpected_keys", "mismatched_keys")
        for key in sorted(report[kind])
    ]
    real = None if "decoder_input_ids" in rows else rows["attention_mask"].bool()
    expected = {"logits": actual.logits, "pair logits": actual.pair_logits, "hidden states": actual.hidden}
    differences = {kind: _relative_difference(expected[kind], values, real) for kind, values in outputs.items()}
    return Parity(name, architecture, tuple(unexpected), tuple(sorted(report["missing_keys"])), differences)


def sample(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """(B, L) ids of random tokens without special ones, attention mask, segments if the model has some, and decoder
    ids. Rows of an encoder-decoder end with the end token, which its task heads need."""
    longest = min(model.max_positions, _LONGEST)
    if isinstance(model, BigbirdConfig):  # longer texts use block-sparse attention
        longest = min(longest, model.dense_length)
    ordinary = torch.tensor([row for row in range(tokenizer.vocab_size) if row not in tokenizer.special_ids])
    lengths = torch.tensor([longest, max(longest - 5, 1), min(longest, _SHORTEST)])
    mask_BL = torch.arange(longest) < lengths[:, None]
    ids_BL = ordinary[torch.arange(mask_BL.numel()) * 7919 % len(ordinary)].reshape(mask_BL.shape)
    rows = {"input_ids": ids_BL, "attention_mask": mask_BL}
    if model.architecture == "encoder_decoder":
        ids_BL[torch.arange(len(lengths)), lengths - 1] = tokenizer.role("eos")
        decoder_ids = ordinary[torch.arange(len(lengths) * _DECODER) % len(ordinary)]
        rows["decoder_input_ids"] = decoder_ids.reshape(-1, _DECODER)
    elif model.segment_types > 1:
        rows["token_type_ids"] = (torch.arange(longest) >= lengths[:, None] // 2).long() * mask_BL
    ids_BL[~mask_BL] = tokenizer.roles.get("pad", 0)
    if model.architecture == "encoder" and model.summary.endswith("last"):  # transformers then pads on the left
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            pairs = zip(rows[name], lengths.tolist(), strict=True)
            rows[name] = torch.stack([row.roll(longest - length) for row, length in pairs])
    return {name: values.long() for name, values in rows.items()}


def _outputs(reference: nn.Module, architecture: str, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a transformers model, under our names. Each row of a multiple choice has one choice."""
    head = head_of_class({"architectures": [architecture]})
    if head is not None and head.name == CHOICES:
        return {"logits": reference(**{name: values[:, None] for name, values in rows.items()}).logits}
    output = dict(reference(**rows))
    if "start_logits" in output:
        return {"logits": torch.stack([output["start_logits"], output["end_logits"]], dim=-1)}
    keys = {"logits": ("logits", "prediction_logits"), "pair logits": ("seq_relationship_logits", "sop_logits")}
    logits = {name: output[key] for name, theirs in keys.items() for key in theirs if key in output}
    return logits or {"hidden states": output["last_hidden_state"]}


def _relative_difference(actual: Tensor | None, reference: Tensor, real_BL: Tensor | None) -> float:
    """The largest relative difference; infinite if lmtool lacks the output. real_BL: real tokens, for outputs over
    tokens."""
    if actual is None:
        return float("inf")
    if real_BL is not None and actual.shape[:2] == reference.shape[:2] == real_BL.shape:
        actual, reference = actual[real_BL], reference[real_BL]
    return relative_difference(actual, reference)


# The exported folder as a transformers user reads texts (AutoTokenizer, padded rows), compared with `lmtool predict` on
# the checkpoint (texts formatted and packed as in training).
_TEXTS = (
    ("A", "b"),
    ("The dog sleeps", "It does."),
    ("What a lovely film!", "An awful one; nobody should have to see it, nobody at all."),
    ("She sells sea shells by the sea shore, and has for many years.", "Ångström naïve 中文 3.14"),
)


def layout_of(model: ModelConfig, task: Mapping[str, object] | None, tokenizer: Tokenizer) -> str | None:
    """The text format of the exported model; None for a decoder without a task, and if the vocabulary lacks the
    format's special tokens."""
    if task is None and model.architecture == "decoder":
        return None
    name = model.text_format if task is None else format_of(model, task)
    return name if set(FORMATS[name].roles) <= set(tokenizer.roles) else None


def reading_of(
    model: ModelConfig, saved: JsonMapping, task: JsonMapping | None, tokenizer: Tokenizer
) -> TokenizerSettings:
    """Settings of AutoTokenizer for the exported model. Without a task, special tokens in texts are parsed, since texts
    for a masked language model contain masks."""
    segments = has_segments(model)
    if task is None:
        return TokenizerSettings(segments, model.max_positions, False)
    return TokenizerSettings(segments, saved["max_length"], not tokenizer.parse_special_tokens)


@torch.no_grad()
def compare_texts(
    comparison: CheckpointComparison,
    original: TaskLearner | CheckpointModel,
    reloaded: LoadedCheckpoint,
    folder: Path,
    layout: str,
    tokenizer: Tokenizer,
) -> None:
    """Record the differences on texts and on pairs that fit into the folder's maximum length.

    Args:
        comparison: Receives the differences.
        original: A task's learner, or a backbone with its heads.
        reloaded: The exported folder, loaded with lmtool.
        folder: The exported folder.
        layout: The text format of the model.
        tokenizer: The checkpoint's tokenizer.
    """
    settings = read_settings(folder)
    longest, split = settings["model_max_length"], bool(settings.get("split_special_tokens"))
    texts = list(_TEXTS)
    if split:
        texts += [(f"so {token} it", f"is {token}") for token in tokenizer.pieces(tokenizer.roles.values())]
    for kind, rows in (("texts", [(first,) for first, _ in texts]), ("pairs", texts)):
        overhead = FormatTemplate.of(text_format(layout, tokenizer), len(rows[0])).special_count
        fitting = [row for row in rows if sum(map(len, tokenizer.encode_batch(row))) + overhead <= longest]
        if isinstance(original, TaskLearner):
            if not original.takes_texts(len(rows[0])):
                continue
            fitting = [row for row in fitting if _is_complete(original, row, longest)]
        if fitting:
            comparison.texts[kind] = _text_difference(original, reloaded, folder, layout, tokenizer, fitting, longest)


def _is_complete(original: TaskLearner, row: tuple[str, ...], longest: int) -> bool:
    """Whether the task makes one example of a row, without truncation."""
    metadata = original.examples_of_texts([row], longest).metadata()
    return metadata["examples"] == 1 and not metadata.get("truncated") and not metadata.get("cut_questions")


def _text_difference(
    original: TaskLearner | CheckpointModel,
    reloaded: LoadedCheckpoint,
    folder: Path,
    layout: str,
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, ...]],
    longest: int,
) -> float:
    """The largest relative difference of predictions; infinite if transformers gives a text other tokens or
    segments."""
    columns = tuple(list(column) for column in zip(*texts, strict=True))
    examples: Examples
    if isinstance(original, TaskLearner):
        examples = original.examples_of_texts(texts, longest)
    else:
        rows = Rows.of_texts(**{f"text{number}": column for number, column in enumerate(columns)})
        examples = SequenceExamples(rows, InputFormat(tokenizer, layout, longest), "sample", "sample")
    plan = examples.plan(0)
    batch = examples.batch(plan.rows, plan.rows["row"].copy(), 0)
    read = tokenized(folder, *columns)
    real = read["attention_mask"].bool()
    zeros = torch.zeros_like(read["input_ids"])
    segments = zeros[real]
    if reloaded.config.segment_types > 1:
        segments = batch.inputs.columns.get("segment", segments)
    if not torch.equal(read["input_ids"][real], batch.inputs.tokens):
        return float("inf")
    if not torch.equal(read.get("token_type_ids", zeros)[real], segments):
        return float("inf")
    if isinstance(original, CheckpointModel) and reloaded.config.architecture == "encoder_decoder":
        return 0.0  # the decoder's input does not depend on how texts are read
    output = reloaded.model(**read)
    reference = [output.hidden[real], output.pair_logits]
    if isinstance(original, TaskLearner):
        logits, target = output.logits, batch.targets.get(original.term)
        if original.scores_tokens and logits is not None:
            logits = logits[real] if target is None or target.at is None else logits[real][target.at]
        reference = [logits]
    pairs = zip(_predictions(original, batch), reference, strict=True)
    differences = [relative_difference(mine, other) for mine, other in pairs if mine is not None and other is not None]
    return float(torch.tensor(differences).max())  # NaN if one is NaN, unlike max()


def _predictions(original: TaskLearner | CheckpointModel, batch: Batch) -> list[Tensor | None]:
    """A task's outputs; otherwise the hidden states, and the pair logits or None."""
    if isinstance(original, TaskLearner):
        return [original.outputs(batch, 0)]
    hidden_TH = original.hidden(batch.inputs, None)
    return [hidden_TH, original.pair_logits(hidden_TH, batch.inputs)]
