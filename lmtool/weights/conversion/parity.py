"""Opens an exported folder with transformers, and compares weights, logits and predictions with those of its
checkpoint.

Shape letters: B rows, L their padded length in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from lmtool.config.base import JsonMapping
from lmtool.data.configs import FORMATS
from lmtool.data.examples import Examples, Rows
from lmtool.data.formats import FormatTemplate, text_format
from lmtool.learners.configs import has_segments
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_configs import BigbirdConfig
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.texts import InputFormat, SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch
from lmtool.weights.comparing import (
    CheckpointComparison,
    quiet_transformers,
    relative_difference,
    tokenize_as_transformers,
)
from lmtool.weights.exporting import TokenizerSettings
from lmtool.weights.folders import read_settings
from lmtool.weights.padded_model import LoadedCheckpoint, PaddedModel
from lmtool.weights.saved_model import CheckpointModel, task_text_format
from lmtool.weights.task_heads import MULTIPLE_CHOICE, head_of_class

PARITY_TOLERANCE = 1e-4
"""Tolerance between the implementations, relative to the largest value, or to 1 if that is larger."""
_LONGEST_ROW, _SHORTEST_ROW, _DECODER_LENGTH = 24, 4, 7
"""Lengths of the sample in tokens: of its longest and its shortest row, and of the decoder's input."""


@dataclass(frozen=True)
class Parity:
    """The comparison of an exported folder, opened by transformers, with its checkpoint.

    No comparison within lmtool can replace this one: a key map that is wrong in both directions is visible only here.

    Attributes:
        library: "transformers" with its version; None if transformers is not installed.
        architecture: The class that opened the folder; None if transformers does not have the class.
        errors: Names of the tensors that the class does not expect, or the reason why it cannot open the folder.
        initialized: Names of the tensors that the folder lacks, such as a pooler, so that transformers initializes
            them.
        differences: Largest relative difference of each output, by the output's name.
    """

    library: str | None
    architecture: str | None = None
    errors: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()
    differences: Mapping[str, float] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether no difference was found. This is also true if nothing was compared."""
        return not self.errors and all(number < PARITY_TOLERANCE for number in self.differences.values())

    def row(self) -> tuple[str, str]:
        """Returns a label and a value for the screen."""
        label = "opened by"
        if self.library is None:
            return label, "lmtool only: not compared, transformers is not installed"
        if self.architecture is None:
            return label, f"lmtool only: {self.library} has no such class"
        initialized = ""
        if self.initialized:
            initialized = f", which initializes missing tensors: {', '.join(self.initialized[:4])}"
        errors = f" · {'; '.join(self.errors[:4])}" if self.errors else ""
        differences = ", ".join(f"{name} {number:.3g}" for name, number in self.differences.items()) or "not known"
        return label, f"{self.library} as {self.architecture}{initialized}{errors} · largest differences: {differences}"


@torch.no_grad()
def parity(folder: Path, architecture: str, original: CheckpointModel, tokenizer: Tokenizer) -> Parity:
    """Opens an exported folder with transformers, and compares its outputs for random token ids with the checkpoint's.
    architecture: the transformers class in config.json."""
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
    if original.task is not None:  # in tasks, the decoder's ids are derived from the text
        rows.pop("decoder_input_ids", None)
    actual = PaddedModel(original, tokenizer.roles.get(model.start_role or "")).eval()(**rows)
    try:
        with quiet_transformers():
            reference, report = model_class.from_pretrained(folder, output_loading_info=True, local_files_only=True)
            outputs = outputs_of(reference.eval(), architecture, rows)
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
    """Builds padded rows of random tokens (no special ones) on which two implementations are compared. Returns inputs
    by the names in transformers, each (B, L) int64: ids and attention mask, for models with segments their segments,
    for encoder-decoders the decoder's ids. The rows of an encoder-decoder end with the end token, because its task
    heads read the state of this token."""
    longest = min(model.max_positions, _LONGEST_ROW)
    if isinstance(model, BigbirdConfig):  # longer texts use block-sparse attention
        longest = min(longest, model.dense_length)
    ordinary = torch.tensor([row for row in range(tokenizer.vocab_size) if row not in tokenizer.special_ids])
    lengths = torch.tensor([longest, max(longest - 5, 1), min(longest, _SHORTEST_ROW)])
    mask_BL = torch.arange(longest) < lengths[:, None]
    ids_BL = ordinary[torch.arange(mask_BL.numel()) * 7919 % len(ordinary)].reshape(mask_BL.shape)
    rows = {"input_ids": ids_BL, "attention_mask": mask_BL}
    if model.architecture == "encoder_decoder":
        ids_BL[torch.arange(len(lengths)), lengths - 1] = tokenizer.role("eos")
        decoder_ids = ordinary[torch.arange(len(lengths) * _DECODER_LENGTH) % len(ordinary)]
        rows["decoder_input_ids"] = decoder_ids.reshape(-1, _DECODER_LENGTH)
    elif model.segment_types > 1:
        rows["token_type_ids"] = (torch.arange(longest) >= lengths[:, None] // 2).long() * mask_BL
    ids_BL[~mask_BL] = tokenizer.roles.get("pad", 0)
    if pads_left(model):
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            rows_and_lengths = zip(rows[name], lengths.tolist(), strict=True)
            rows[name] = torch.stack([row.roll(longest - length) for row, length in rows_and_lengths])
    return {name: values.long() for name, values in rows.items()}


def pads_left(model: ModelConfig) -> bool:
    """Returns whether the family's classes in transformers expect padding on the left: encoders that classify by the
    last token (XLNet) read the last column of a batch. Decoders find the last token that is not padding."""
    return model.architecture == "encoder" and model.summary.endswith("last")


def outputs_of(reference: nn.Module, architecture: str, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Computes the outputs of a transformers model, by the names that `Parity` uses. For multiple choice, every row is
    the only choice of a question."""
    head = head_of_class({"architectures": [architecture]})
    if head is not None and head.name == MULTIPLE_CHOICE:
        return {"logits": reference(**{name: values[:, None] for name, values in rows.items()}).logits}
    output = dict(reference(**rows))
    if "start_logits" in output:
        return {"logits": torch.stack([output["start_logits"], output["end_logits"]], dim=-1)}
    keys = {"logits": ("logits", "prediction_logits"), "pair logits": ("seq_relationship_logits", "sop_logits")}
    logits = {name: output[key] for name, hf_keys in keys.items() for key in hf_keys if key in output}
    return logits or {"hidden states": output["last_hidden_state"]}


def _relative_difference(actual: Tensor | None, reference: Tensor, real_BL: Tensor | None) -> float:
    """The largest relative difference of an output, at real tokens where `real_BL` is true; infinite if lmtool does not
    have the output."""
    if actual is None:
        return float("inf")
    if real_BL is not None and actual.shape[:2] == reference.shape[:2] == real_BL.shape:
        actual, reference = actual[real_BL], reference[real_BL]
    return relative_difference(actual, reference)


# The second comparison starts from texts. The exported folder reads them as a user of transformers does (AutoTokenizer,
# padded rows), the checkpoint reads them as `lmtool predict` does (formatted and packed as in training).
_TEXTS = (
    ("A", "b"),
    ("The dog sleeps", "It does."),
    ("What a lovely film!", "An awful one; nobody should have to see it, nobody at all."),
    ("She sells sea shells by the sea shore, and has for many years.", "Ångström naïve 中文 3.14"),
)


def exported_format(model: ModelConfig, task: Mapping[str, object] | None, tokenizer: Tokenizer) -> str | None:
    """Returns the name of the exported model's text format. None means that no special tokens are added: for a decoder
    without a task, or because the vocabulary lacks the special tokens of the format."""
    if task is None and model.architecture == "decoder":
        return None
    name = model.text_format if task is None else task_text_format(model, task)
    return name if set(FORMATS[name].roles) <= set(tokenizer.roles) else None


def tokenizer_settings(
    model: ModelConfig, saved: JsonMapping, task: JsonMapping | None, tokenizer: Tokenizer
) -> TokenizerSettings:
    """Returns the settings of AutoTokenizer for the exported model. Without a task, special tokens in texts are parsed,
    because texts for a masked language model contain mask tokens."""
    segments, left = has_segments(model), pads_left(model)
    if task is None:
        return TokenizerSettings(segments, model.max_positions, False, left)
    return TokenizerSettings(segments, saved["max_length"], not tokenizer.parse_special_tokens, left)


@torch.no_grad()
def compare_texts(
    comparison: CheckpointComparison,
    original: TaskLearner | CheckpointModel,
    reloaded: LoadedCheckpoint,
    folder: Path,
    format_name: str,
    tokenizer: Tokenizer,
) -> None:
    """Records the differences of the predictions for sample texts and pairs that fit into the folder's maximum length.
    original: the learner of a task, or a backbone with its heads. reloaded: the exported folder, loaded with lmtool.
    format_name: the model's text format."""
    settings = read_settings(folder)
    longest, splits_special = settings["model_max_length"], bool(settings.get("split_special_tokens"))
    texts = list(_TEXTS)
    if splits_special:
        texts += [(f"so {token} it", f"is {token}") for token in tokenizer.pieces(tokenizer.roles.values())]
    for kind, rows in (("texts", [(first,) for first, _ in texts]), ("pairs", texts)):
        overhead = FormatTemplate.of(text_format(format_name, tokenizer), len(rows[0])).special_count
        fitting = [row for row in rows if sum(map(len, tokenizer.encode_batch(row))) + overhead <= longest]
        if isinstance(original, TaskLearner):
            if not original.takes_texts(len(rows[0])):
                continue
            fitting = [row for row in fitting if _is_complete(original, row, longest)]
        if fitting:
            comparison.prediction_differences[kind] = _text_difference(
                original, reloaded, folder, format_name, tokenizer, fitting, longest
            )


def _is_complete(original: TaskLearner, row: tuple[str, ...], longest: int) -> bool:
    metadata = original.examples_of_texts([row], longest).metadata()
    return metadata["examples"] == 1 and not metadata.get("truncated") and not metadata.get("cut_questions")


def _text_difference(
    original: TaskLearner | CheckpointModel,
    reloaded: LoadedCheckpoint,
    folder: Path,
    format_name: str,
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, ...]],
    longest: int,
) -> float:
    """The largest relative difference of the predictions; infinite if AutoTokenizer encodes a text differently."""
    columns = tuple(list(column) for column in zip(*texts, strict=True))
    examples: Examples
    if isinstance(original, TaskLearner):
        examples = original.examples_of_texts(texts, longest)
    else:
        rows = Rows.of_texts(**{f"text{number}": column for number, column in enumerate(columns)})
        examples = SequenceExamples(rows, InputFormat(tokenizer, format_name, longest), "sample", "sample")
    plan = examples.plan(0)
    batch = examples.batch(plan.rows, plan.rows["row"].copy(), 0)
    inputs = tokenize_as_transformers(folder, *columns)
    real = inputs["attention_mask"].bool()
    zeros = torch.zeros_like(inputs["input_ids"])
    segments = zeros[real]
    if reloaded.config.segment_types > 1:
        segments = batch.inputs.columns.get("segment", segments)
    if not torch.equal(inputs["input_ids"][real], batch.inputs.tokens):
        return float("inf")
    if not torch.equal(inputs.get("token_type_ids", zeros)[real], segments):
        return float("inf")
    if isinstance(original, CheckpointModel) and reloaded.config.architecture == "encoder_decoder":
        return 0.0  # only the encoder reads the text, and its tokens were compared above
    output = reloaded.model(**inputs)
    reference = [output.hidden[real], output.pair_logits]
    if isinstance(original, TaskLearner):
        logits, target = output.logits, batch.targets.get(original.term)
        if original.config.scores_tokens and logits is not None:
            logits = logits[real] if target is None or target.at is None else logits[real][target.at]
        reference = [logits]
    pairs = zip(_predictions(original, batch), reference, strict=True)
    differences = [
        relative_difference(expected, actual)
        for expected, actual in pairs
        if expected is not None and actual is not None
    ]
    # In contrast to max(), the result is NaN if any difference is NaN.
    return float(torch.tensor(differences).max())


def _predictions(original: TaskLearner | CheckpointModel, batch: Batch) -> list[Tensor | None]:
    """Without a task, the hidden states and the logits of a head over pairs."""
    if isinstance(original, TaskLearner):
        return [original.outputs(batch, 0)]
    hidden_TH = original.hidden(batch.inputs, None)
    return [hidden_TH, original.pair_logits(hidden_TH, batch.inputs)]
