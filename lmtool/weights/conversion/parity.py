"""An exported folder opened with transformers and compared with its checkpoint: weights, logits, predictions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from lmtool.weights.comparing import CheckpointComparison, difference, tokenized
from lmtool.weights.exporting import TokenizerSettings
from lmtool.weights.folders import read_settings
from lmtool.weights.heads import CheckpointModel, format_of
from lmtool.weights.load import LoadedCheckpoint, PaddedModel
from lmtool.weights.task_heads import CHOICES, head_of_class

# An exported folder opened with transformers, if that is installed: outputs for random ids, compared with the
# checkpoint's. Only this shows a mapping that is wrong in both directions.
#
# Shape letters: B rows, L the longest of them in tokens.


PARITY = 1e-4
"""Two implementations may differ by so much of the largest value, or of 1 where that is smaller."""
_LONGEST, _SHORTEST, _DECODER = 24, 4, 7


@dataclass(frozen=True)
class Parity:
    """library: transformers and its version, None where it is not installed. opened: the class that opened the folder;
    None where there is none. faults: tensors that it does not know, or why it does not open. drawn: tensors that the
    file lacks, which it draws: a pooler that the checkpoint has not, or those of an output that differs then.
    differences: the largest one of each output, as a share of its largest value where that is above 1."""

    library: str | None
    opened: str | None = None
    faults: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    differences: Mapping[str, float] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether it gives what the checkpoint gives; so too where nothing was compared."""
        return not self.faults and all(number < PARITY for number in self.differences.values())

    def row(self) -> tuple[str, str]:
        """What the screen says: a word and what there is to it."""
        word = "opened by"
        if self.library is None:
            return word, "lmtool alone: transformers is not installed here, and the folder was not compared with it"
        if self.opened is None:
            return word, f"lmtool alone: {self.library} has no such class"
        drawn = f", which draws what the checkpoint has not: {', '.join(self.drawn[:4])}" if self.drawn else ""
        faults = f" · {'; '.join(self.faults[:4])}" if self.faults else ""
        each = ", ".join(f"{name} {number:.3g}" for name, number in self.differences.items())
        return word, f"{self.library} as {self.opened}{drawn}{faults} · largest differences: {each or 'not known'}"


@torch.no_grad()
def parity(folder: Path, architecture: str, original: CheckpointModel, tokenizer: Tokenizer) -> Parity:
    """Open an exported folder with the class of transformers that its config.json names, and compare. original: the
    checkpoint's model. tokenizer: the one that was exported."""
    try:
        import transformers as library

        opens = getattr(library, architecture, None)
    except (ImportError, RuntimeError):  # RuntimeError: its own word for a module that cannot be imported
        return Parity(None)
    name = f"transformers {library.__version__}"
    if opens is None:
        return Parity(name)
    model = original.backbone.config
    rows = sample(model, tokenizer)
    if original.task is not None:  # its decoder reads the same text
        rows.pop("decoder_input_ids", None)
    mine = PaddedModel(original, tokenizer.roles.get(model.start_role or "")).eval()(**rows)
    try:
        with _quiet(library):
            theirs, report = opens.from_pretrained(folder, output_loading_info=True, local_files_only=True)
            outputs = _outputs(theirs.eval(), architecture, rows)
    except Exception as error:  # whatever it is: it does not read what was written
        return Parity(name, architecture, (f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",))
    faults = [
        f"{kind.removesuffix('_keys')} {key if isinstance(key, str) else key[0]}"
        for kind in ("unexpected_keys", "mismatched_keys")
        for key in sorted(report[kind])
    ]
    real = None if "decoder_input_ids" in rows else rows["attention_mask"].bool()
    known = {"logits": mine.logits, "pair logits": mine.pair_logits, "hidden states": mine.hidden}
    differences = {kind: _share(known[kind], values, real) for kind, values in outputs.items()}
    return Parity(name, architecture, tuple(faults), tuple(sorted(report["missing_keys"])), differences)


def sample(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """(B, L) ids of random tokens that are no special ones, their mask, segments where the model has some, and ids for
    a decoder. Rows of an encoder-decoder end with their end token, as its task's heads need it."""
    longest = min(model.max_positions, _LONGEST)
    if isinstance(model, BigbirdConfig):  # longer texts are seen by blocks, see models/bigbird.py
        longest = min(longest, model.dense_length)
    ordinary = torch.tensor([row for row in range(tokenizer.vocab_size) if row not in tokenizer.special_ids])
    lengths = torch.tensor([longest, max(longest - 5, 1), min(longest, _SHORTEST)])
    mask_BL = torch.arange(longest) < lengths[:, None]
    ids_BL = ordinary[torch.arange(mask_BL.numel()) * 7919 % len(ordinary)].reshape(mask_BL.shape)
    rows = {"input_ids": ids_BL, "attention_mask": mask_BL}
    if model.architecture == "encoder_decoder":
        ids_BL[torch.arange(len(lengths)), lengths - 1] = tokenizer.role("eos")
        rows["decoder_input_ids"] = ordinary[torch.arange(len(lengths) * _DECODER) % len(ordinary)].reshape(
            -1, _DECODER
        )
    elif model.segment_types > 1:
        rows["token_type_ids"] = (torch.arange(longest) >= lengths[:, None] // 2).long() * mask_BL
    ids_BL[~mask_BL] = tokenizer.roles.get("pad", 0)
    if model.architecture == "encoder" and model.summary.endswith("last"):  # which is at the end of a row there
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            pairs = zip(rows[name], lengths.tolist(), strict=True)
            rows[name] = torch.stack([row.roll(longest - length) for row, length in pairs])
    return {name: values.long() for name, values in rows.items()}


def _outputs(theirs: Any, architecture: str, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a class of transformers gives, under our names. Of choices each row is one."""
    head = head_of_class({"architectures": [architecture]})
    if head is not None and head.name == CHOICES:
        return {"logits": theirs(**{name: values[:, None] for name, values in rows.items()}).logits}
    output = dict(theirs(**rows))
    if "start_logits" in output:
        return {"logits": torch.stack([output["start_logits"], output["end_logits"]], dim=-1)}
    names = {
        "logits": "logits", "prediction_logits": "logits", "seq_relationship_logits": "pair logits",
        "sop_logits": "pair logits",
    }  # fmt: skip
    found = {ours: output[key] for key, ours in names.items() if key in output}
    return found or {"hidden states": output["last_hidden_state"]}


def _share(mine: Tensor | None, theirs: Tensor, real_BL: Tensor | None) -> float:
    """The largest difference beside the largest value; infinite where there is no output of ours. real_BL: where tokens
    are, of outputs over them."""
    if mine is None:
        return float("inf")
    if real_BL is not None and mine.shape[:2] == theirs.shape[:2] == real_BL.shape:
        mine, theirs = mine[real_BL], theirs[real_BL]
    return difference(mine, theirs) / max(1.0, float(mine.abs().max()))


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Without its progress bars and warnings, which are then as before."""
    logging = library.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# An exported folder as a transformers user reads it, compared with `lmtool predict` on the checkpoint.
#
# On one side the folder's tokenizer and settings are read as AutoTokenizer does, with padded rows; on the other side
# texts are formatted and packed as in training.


_TEXTS = (
    ("A", "b"),
    ("The dog sleeps", "It does."),
    ("What a lovely film!", "An awful one; nobody should have to see it, nobody at all."),
    ("She sells sea shells by the sea shore, and has for many years.", "Ångström naïve 中文 3.14"),
)


def layout_of(model: ModelConfig, task: Mapping[str, object] | None, tokenizer: Tokenizer) -> str | None:
    """The format in which the exported model reads a text; None where it continues one, which stands as it is, and
    where the vocabulary lacks what the format puts around texts."""
    if task is None and model.architecture == "decoder":
        return None
    name = model.text_format if task is None else format_of(model, task)
    return name if set(FORMATS[name].roles) <= set(tokenizer.roles) else None


def reading_of(
    model: ModelConfig, saved: JsonMapping, task: JsonMapping | None, tokenizer: Tokenizer
) -> TokenizerSettings:
    """How AutoTokenizer is to read texts. Those of a masked language model may hold masks."""
    segments = has_segments(model)
    if task is None:
        return TokenizerSettings(segments, model.max_positions, False)
    return TokenizerSettings(segments, saved["max_length"], not tokenizer.parse_special_tokens)


@torch.no_grad()
def compare_texts(
    comparison: CheckpointComparison,
    original: TaskLearner | CheckpointModel,
    again: LoadedCheckpoint,
    folder: Path,
    layout: str,
    tokenizer: Tokenizer,
) -> None:
    """Enter the differences on texts and on pairs, each as long as the folder allows. original: a task's learner, or a
    backbone with its heads. layout: the format that it reads."""
    settings = read_settings(folder)
    longest, split = settings["model_max_length"], bool(settings.get("split_special_tokens"))
    texts = list(_TEXTS)
    if split:
        texts += [(f"so {written} it", f"is {written}") for written in tokenizer.pieces(tokenizer.roles.values())]
    for kind, rows in (("texts", [(first,) for first, _ in texts]), ("pairs", texts)):
        overhead = FormatTemplate.of(text_format(layout, tokenizer), len(rows[0])).special_count
        fitting = [row for row in rows if sum(map(len, tokenizer.encode_batch(row))) + overhead <= longest]
        if isinstance(original, TaskLearner):
            if not original.takes_texts(len(rows[0])):
                continue
            fitting = [row for row in fitting if _is_whole(original, row, longest)]
        if fitting:
            comparison.texts[kind] = _difference(original, again, folder, layout, tokenizer, fitting, longest)


def _is_whole(original: TaskLearner, row: tuple[str, ...], longest: int) -> bool:
    """Whether the task reads all of a row, and in one piece."""
    metadata = original.examples_of_texts([row], longest).metadata()
    return metadata["examples"] == 1 and not metadata.get("truncated") and not metadata.get("cut_questions")


def _difference(
    original: TaskLearner | CheckpointModel,
    again: LoadedCheckpoint,
    folder: Path,
    layout: str,
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, ...]],
    longest: int,
) -> float:
    """The largest difference in what is predicted; infinite where a text is read as other tokens or segments."""
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
    none = torch.zeros_like(read["input_ids"])
    ours = batch.inputs.columns.get("segment", none[real]) if _has_segments(again) else none[real]
    if not torch.equal(read["input_ids"][real], batch.inputs.tokens):
        return float("inf")
    if not torch.equal(read.get("token_type_ids", none)[real], ours):
        return float("inf")
    if isinstance(original, CheckpointModel) and again.config.architecture == "encoder_decoder":
        return 0.0  # what its decoder continues has nothing to do with how texts are read
    copied = again.model(**read)
    theirs = [copied.hidden[real], copied.pair_logits]
    if isinstance(original, TaskLearner):
        logits, target = copied.logits, batch.targets.get(original.term)
        if original.scores_tokens and logits is not None:
            logits = logits[real] if target is None or target.at is None else logits[real][target.at]
        theirs = [logits]
    pairs = zip(_predicted(original, batch), theirs, strict=True)
    differences = [
        difference(mine, other) / max(1.0, float(mine.abs().max()))
        for mine, other in pairs
        if mine is not None and other is not None
    ]
    return float(torch.tensor(differences).max())  # no number where one is none


def _has_segments(loaded: LoadedCheckpoint) -> bool:
    return loaded.config.segment_types > 1


def _predicted(original: TaskLearner | CheckpointModel, batch: Batch) -> list[Tensor | None]:
    """A task's outputs; else the hidden states, and the logits over pairs where there are any."""
    if isinstance(original, TaskLearner):
        return [original.outputs(batch, 0)]
    hidden_TH = original.hidden(batch.inputs, None)
    return [hidden_TH, original.pair_logits(hidden_TH, batch.inputs)]
