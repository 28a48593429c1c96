"""`lmtool import tokenizer=`: replaces the vocabulary of a pretrained checkpoint, and measures the loss before and
after. Each new entry is mapped to the equal old entry, or to the old tokens of its text.

Shape letters: V entries of the old vocabulary, N entries of the new one, P old subwords of all new entries, W values of
a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from tokenizers import models
from torch import Tensor
from torch.nn.functional import embedding_bag

from lmtool.config import saved as saved_configs
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import build
from lmtool.errors import CheckFailed, UserError
from lmtool.learners.configs import missing_token
from lmtool.learners.held_out import EVALUATION_TOKENS, HeldOutSplits
from lmtool.learners.metrics.texts import word_and_byte_rates
from lmtool.learners.model import ModelWithHeads
from lmtool.learners.rules import format_roles
from lmtool.models.configs import ModelConfig
from lmtool.models.heads.lm import LMHead
from lmtool.reporting.console import Output
from lmtool.resolver.commands import EvaluateConfig, ImportConfig, PretrainConfig
from lmtool.session.evaluation import text_to_score
from lmtool.session.open_run import hub_tokenizer, require_fit
from lmtool.session.trained import Trained, classifies, read_trained
from lmtool.system.files import user_path
from lmtool.system.secrets import masked, masked_data
from lmtool.tokenizers.configs import FolderConfig
from lmtool.tokenizers.entries import PREFIX, SPACE, SUFFIX, EntryText, entry_text
from lmtool.tokenizers.folders import has_tokenizer
from lmtool.tokenizers.tokenizer import ROLES, Tokenizer
from lmtool.training.precision import select_device, select_precision
from lmtool.weights.assemble import assemble
from lmtool.weights.comparing import same_tensors
from lmtool.weights.exporting import IMPORT_COMMAND, require_new, write_checkpoint
from lmtool.weights.folders import HFFolder, hf_folder
from lmtool.weights.reading import Weights, read
from lmtool.weights.saved_model import SavedModel, saved_config, saved_model

# Roles of tokens at the same position in a text. Padding comes last, since its token may also have another role.
_EQUIVALENT_ROLES = {"cls": "bos", "bos": "cls", "sep": "eos", "eos": "sep"}
_ORDERED_ROLES = (*(role for role in ROLES if role != "pad"), "pad")
Resizable = TypeVar("Resizable", bound=SavedModel | PretrainConfig)


@dataclass(frozen=True)
class Replacement:
    """The map between two vocabularies. sources: for each new id, the old ids whose vectors are averaged; may be empty.
    matched: old ids by new id, for entries with the same role or text in both. old_size: number of old entries."""

    sources: tuple[np.ndarray, ...]
    matched: Mapping[int, int]
    old_size: int

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of retained, new and dropped entries, and of new entries without old tokens."""
        return {
            "kept": len(self.matched),
            "new": len(self.sources) - len(self.matched),
            "dropped": self.old_size - len(set(self.matched.values())),
            "without_old_pieces": sum(len(ids) == 0 for ids in self.sources),
        }


def replacement(old: Tokenizer, new: Tokenizer) -> Replacement:
    """Maps the entries of `new` to the entries of `old`.

    Special tokens are matched by role, sentinels by number, and other entries by text: they are equal if they have the
    same spelling or, if the tokenizers mark words differently, the same text at the same position in a word. The old
    tokenizer tokenizes the text of each unmatched entry.
    """
    matched = _match_entries(old, new)
    words = new.pieces(range(new.vocab_size))
    texts = {
        number: entry_text(new.marks, words[number])
        for number in range(new.vocab_size)
        if number not in matched and number not in new.special_ids and words[number]
    }
    segments = _Segmenter(old, new).segment([(words[number], entry) for number, entry in texts.items()])
    tokenized = dict(zip(texts, segments, strict=True))
    empty = np.empty(0, dtype=np.int64)
    sources = [
        np.array([matched[number]]) if number in matched else tokenized.get(number, empty)
        for number in range(new.vocab_size)
    ]
    return Replacement(tuple(sources), matched, old.vocab_size)


def _match_entries(old: Tokenizer, new: Tokenizer) -> dict[int, int]:
    matched: dict[int, int] = {}
    for role in _ORDERED_ROLES:
        old_role = next((name for name in (role, _EQUIVALENT_ROLES.get(role)) if name in old.roles), None)
        if role in new.roles and old_role is not None:
            matched.setdefault(new.roles[role], old.roles[old_role])
    matched |= dict(zip(new.sentinels, old.sentinels, strict=False))
    old_words, new_words = old.pieces(range(old.vocab_size)), new.pieces(range(new.vocab_size))
    special = {old_words[number]: number for number in old.special_ids}
    old_ids = _ids_by_text(old, old_words, old.marks == new.marks)
    for number, word in enumerate(new_words):
        if number in matched or not word:
            continue
        if number in new.special_ids:
            old_id = special.get(word)
        else:
            old_id = old_ids.get(word if old.marks == new.marks else entry_text(new.marks, word))
        if old_id is not None:
            matched[number] = old_id
    # Ids without an entry have unused rows in the embedding, which are matched in order.
    unused = ([number for number, word in enumerate(words) if not word] for words in (new_words, old_words))
    return matched | dict(zip(*unused, strict=False))


def _ids_by_text(old: Tokenizer, words: Sequence[str], by_spelling: bool) -> dict[str | EntryText | None, int]:
    """Returns the ids of a vocabulary's text entries, by spelling or by text; the smallest id if several are equal."""
    ids = [number for number in range(len(words)) if words[number] and number not in old.special_ids]
    keys = {number: words[number] if by_spelling else entry_text(old.marks, words[number]) for number in reversed(ids)}
    return {key: number for number, key in keys.items() if key is not None}


class _Segmenter:
    def __init__(self, old: Tokenizer, new: Tokenizer):
        self.old = old
        words = old.pieces(range(old.vocab_size))
        self.numbers = {word: number for number, word in enumerate(words) if word}
        # Byte-level entries that start a word begin with a space. In a vocabulary of characters the space is a separate
        # token, which a new entry gets only if the new vocabulary marks spaces.
        marks_spaces = new.marks in ("bytes", "space", "characters")
        self.with_space = old.marks == "bytes" or (old.marks == "characters" and marks_spaces)
        self.continuations = _continuation_model(self.numbers, old) if old.marks == "continues" else None

    def segment(self, entries: Sequence[tuple[str, EntryText | None]]) -> list[np.ndarray]:
        """Returns the (P,) int64 old ids of each entry (spelling, text), without special and unknown tokens."""
        texts = [self._text(entry) for _, entry in entries]
        tokens = [
            [number for number in ids.tolist() if number not in self.old.special_ids] if entry else self._byte_ids(word)
            for (word, entry), ids in zip(entries, self.old.encode_batch(texts), strict=True)
        ]
        return [
            np.array(self._adjust_ends(ids, entry), dtype=np.int64)
            for ids, (_, entry) in zip(tokens, entries, strict=True)
        ]

    def _text(self, entry: EntryText | None) -> str:
        if entry is None:
            return ""
        return " " * (entry.starts and self.with_space) + entry.text

    def _byte_ids(self, word: str) -> list[int]:
        characters = word if self.old.marks == "bytes" else ""
        return [self.numbers[character] for character in characters if character in self.numbers]

    def _adjust_ends(self, ids: list[int], entry: EntryText | None) -> list[int]:
        """Replaces the first (last) token by its variant within a word, if the entry does not start (end) a word."""
        if entry is None:
            return ids
        if self.continuations is not None and (not entry.starts or not ids):
            text = self.old.normalize(entry.text).strip()
            tokens = [piece.id for piece in self.continuations.tokenize(text)]
            return ids if set(tokens) & self.old.special_ids else tokens or ids
        if not ids:
            return ids
        first, *rest = ids
        (word,) = self.old.pieces([first])
        if not entry.starts and self.old.marks == "space" and word.startswith(SPACE):
            if word == SPACE and rest:
                return rest
            first = self.numbers.get(word.removeprefix(SPACE), first)
        ids = [first, *rest]
        (word,) = self.old.pieces(ids[-1:])
        if entry.ends is False and self.old.marks == "end":
            ids[-1] = self.numbers.get(word.removesuffix(SUFFIX), ids[-1])
        return ids


def _continuation_model(numbers: Mapping[str, int], old: Tokenizer) -> models.WordPiece:
    """Returns a WordPiece model that tokenizes text within a word, so that the first token is a continuation too."""
    continuing = {word.removeprefix(PREFIX): number for word, number in numbers.items() if word.startswith(PREFIX)}
    (unknown,) = old.pieces([old.role("unk")])
    return models.WordPiece({**numbers, **continuing}, unk_token=unknown, max_input_chars_per_word=1000)


def vocabulary_tensors(
    smaller: SavedModel | PretrainConfig, larger: SavedModel | PretrainConfig, saved: Collection[str]
) -> list[str]:
    """Returns the names of the tensors whose first dimension is the vocabulary: those whose shapes differ between the
    model and the same model with a larger vocabulary. saved: names of the checkpoint's tensors, which show whether an
    output layer is untied."""
    shapes = []
    with torch.device("meta"):
        for blueprint in (smaller, larger):
            learner: ModelWithHeads = assemble(blueprint, None)[0]
            for name, module in learner.named_modules():
                if isinstance(module, LMHead) and module.output is None and f"{name}.output.weight" in saved:
                    module.untie(blueprint.model.vocab_size, 1)
            shapes.append({name: tensor.shape for name, tensor in learner.state_dict().items()})
    smaller_shapes, larger_shapes = shapes
    return [name for name, shape in smaller_shapes.items() if name in larger_shapes and shape != larger_shapes[name]]


def replaced_rows(tensors: Mapping[str, Tensor], names: Sequence[str], replacement: Replacement) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint with rows for the new vocabulary in those tensors (`names`) whose first
    dimension is the vocabulary.

    An entry of both vocabularies keeps its row bit for bit. A new entry gets the mean of the rows of the old subwords
    into which the old tokenizer splits it, or the mean of all old rows if there are none. Unused rows after the old
    vocabulary are appended unchanged.
    """
    entries = replacement.old_size
    return {
        name: torch.cat([_new_rows(tensor[:entries], replacement), tensor[entries:]]) if name in names else tensor
        for name, tensor in tensors.items()
    }


def _new_rows(table: Tensor, replacement: Replacement) -> Tensor:
    """Returns the rows of the new entries, (N, ...), as copies or means of rows of the old table, (V, ...)."""
    counts = np.array([len(ids) for ids in replacement.sources])
    ids_P = torch.from_numpy(np.concatenate([*replacement.sources, np.empty(0, dtype=np.int64)]))
    starts_N = torch.from_numpy(np.cumsum(counts) - counts)
    flat_VW = table.reshape(len(table), -1).float()
    means_NW = embedding_bag(ids_P, flat_VW, starts_N, mode="mean")
    means_NW[torch.from_numpy(counts == 0)] = flat_VW.double().mean(0).float()
    rows = means_NW.reshape(len(counts), *table.shape[1:]).to(table.dtype)
    copied = torch.from_numpy(counts == 1)  # a mean in fp32 would not be bitwise equal
    rows[copied] = table[ids_P[starts_N[copied]]]
    return rows


REPORT = "replaced.json"
# A text with capitals, accents and repeated spaces, which some tokenizers remove.
_NORMALIZATION_SAMPLE = "A  b\n\tÉ"


@dataclass(frozen=True)
class TextLoss:
    """The loss with the old and the new vocabulary. term: name of the loss term. text: title of the text on which the
    loss was measured. before: bits per byte with the old vocabulary. If the objective predicts only some tokens, the
    others count with the mean loss of the predicted tokens. after: bits per byte with the new vocabulary."""

    term: str
    text: str
    before: float
    after: float


def replace_tokenizer(config: ImportConfig, tokenizer_path: str) -> None:
    """Writes the checkpoint with a new vocabulary, reads it back, and prints what changed. tokenizer_path: folder or
    hub address. Raises UserError if the checkpoint was finetuned, or if the new vocabulary lacks a special token that
    the checkpoint's objective needs, and CheckFailed if the checkpoint is read back with other tensors."""
    folder = user_path(config.output)
    require_new(folder)
    hugging_face = hf_folder(config.checkpoint, config.offline)
    saved, weights = saved_config(config.checkpoint, config.offline), read(config.checkpoint, config.offline)
    _require_pretrained(config, hugging_face, saved, weights)
    parses = bool((saved.get("tokenizer") or {}).get("parse_special_tokens"))
    old_tokenizer = Tokenizer.load(weights.folder, parses)
    new_tokenizer = _load_tokenizer(FolderConfig(path=tokenizer_path, parse_special_tokens=parses), config.offline)

    trained = _read_with_head(config, saved, weights)
    blueprint: SavedModel | PretrainConfig = saved_model(config.checkpoint, saved, weights.tensors)
    if trained is not None and "objective" in saved:
        blueprint = cast(PretrainConfig, trained.config)  # with the heads of the objective
    model = blueprint.model
    if old_tokenizer.vocab_size > model.vocab_size:
        message = (
            f"the tokenizer has {old_tokenizer.vocab_size:,} tokens, but the embedding has {model.vocab_size:,} rows"
        )
        hint = "copy the tokenizer with which the checkpoint was trained into its folder"
        raise UserError(f"checkpoint={config.checkpoint}: {message}", hint)
    mapping = replacement(old_tokenizer, new_tokenizer)
    row_count = new_tokenizer.vocab_size + model.vocab_size - old_tokenizer.vocab_size
    _require_roles(trained, model.model_copy(update={"vocab_size": row_count}), new_tokenizer, tokenizer_path)
    larger = _resize(blueprint, model.vocab_size + 1)
    names = vocabulary_tensors(blueprint, larger, weights.tensors.keys())
    names = [name for name in names if name in weights.tensors]
    tensors = replaced_rows(weights.tensors, names, mapping)
    loss: TextLoss | str = "the checkpoint has no head that predicts tokens"
    if trained is not None:
        resized = _resize(cast(PretrainConfig, trained.config), row_count)
        new_model = replace(trained, config=resized, tokenizer=new_tokenizer, weights=replace(weights, tensors=tensors))
        loss = _measure_loss(config, trained, new_model)

    report = {
        "checkpoint": masked(config.checkpoint),
        "tokenizer": masked(tokenizer_path),
        **mapping.counts,
        "rows_without_entry": model.vocab_size - old_tokenizer.vocab_size,
        "tensors": names,
        "bits_per_byte": None if isinstance(loss, str) else asdict(loss),
    }
    section = {"name": "folder", "path": masked(str(folder)), "parse_special_tokens": parses}
    new_config = _new_config(config, hugging_face, saved, weights)
    new_config |= {"model": {**new_config["model"], "vocab_size": row_count}, "tokenizer": section}
    write_checkpoint(new_config, tensors, new_tokenizer, folder, {REPORT: report})
    if not same_tensors(tensors, read(str(folder), offline=True).tensors):
        raise CheckFailed(f"{folder} differs from what was written", "check the disk, and keep the checkpoint")
    _report(folder, mapping, report, loss, old_tokenizer, new_tokenizer)


def _require_pretrained(
    config: ImportConfig, hugging_face: HFFolder | None, saved: Mapping[str, object], weights: Weights
) -> None:
    hint = "replace the tokenizer of the pretrained checkpoint, and finetune the result"
    if saved.get("tuning") or saved.get("task") or saved.get("command") == "finetune":
        raise UserError(f"tokenizer={config.tokenizer}: checkpoint={config.checkpoint} was finetuned", hint)
    if hugging_face is not None and classifies(hugging_face, weights):
        raise UserError(f"tokenizer={config.tokenizer}: checkpoint={config.checkpoint} has a task head", hint)
    if not has_tokenizer(weights.folder):
        raise UserError(
            f"tokenizer={config.tokenizer}: checkpoint={config.checkpoint} has no tokenizer to replace",
            "copy the files of the tokenizer that the checkpoint was trained with into its folder",
        )


def _load_tokenizer(config: FolderConfig, offline: bool) -> Tokenizer:
    """Error messages name the key of the command, `tokenizer=`."""
    try:
        tokenizer: Tokenizer = hub_tokenizer(config, offline) or build(config, (), 0)
        return tokenizer
    except UserError as error:
        raise UserError(error.message.replace("tokenizer.path=", "tokenizer="), error.hint) from error


def _read_with_head(config: ImportConfig, saved: Mapping[str, object], weights: Weights) -> Trained | None:
    """Returns None for a Hugging Face encoder without a pretraining head, which the loss needs."""
    model = saved_model(config.checkpoint, saved, weights.tensors).model
    encoder = model.architecture == "encoder" and "objective" not in saved
    if encoder and not any(name.startswith("heads.masked_lm.") for name in weights.tensors):
        return None
    precision = select_precision("fp32", select_device("auto"))
    return read_trained(config.checkpoint, config.offline, precision)


def _require_roles(trained: Trained | None, model: ModelConfig, new_tokenizer: Tokenizer, path: str) -> None:
    hint = "use a tokenizer that has this token; lmtool tokenizer trains one, see tokenizer.special_tokens="
    if trained is None:
        missing = missing_token(format_roles(model), new_tokenizer.roles)
        if missing is not None:
            message = f"tokenizer={path} has no {missing}, which model={model.name} adds to its texts"
            raise UserError(message, hint)
        return
    try:
        require_fit(_resize(cast(PretrainConfig, trained.config), model.vocab_size), new_tokenizer)
    except UserError as error:
        raise UserError(f"tokenizer={path}: {error.message}", hint) from error


def _resize(blueprint: Resizable, rows: int) -> Resizable:
    model = blueprint.model.model_copy(update={"vocab_size": rows})
    if isinstance(blueprint, PretrainConfig):
        return blueprint.model_copy(update={"model": model})
    return cast(Resizable, replace(cast(SavedModel, blueprint), model=model))


def _measure_loss(config: ImportConfig, before: Trained, after: Trained) -> TextLoss | str:
    """Returns the reason as text if the loss of the original checkpoint cannot be measured."""
    values: list[float] = []
    term = title = ""
    for trained in (before, after):
        assert isinstance(trained.config, PretrainConfig)
        request = EvaluateConfig(
            checkpoint=config.checkpoint, data=config.data, cache_dir=config.cache_dir, offline=config.offline
        )
        data, title = text_to_score(request, trained, trained.config)
        learner, length = trained.learner(), trained.config.max_length
        terms = [name for name in learner.loss_weights if name not in trained.tasks]
        if not terms:
            return "the checkpoint's objective predicts no tokens of text"
        term = terms[0]
        budget = max(EVALUATION_TOKENS, length)
        try:
            held_out = HeldOutSplits(learner, {"validation": data}, length, budget, trained.config.seed)
        except UserError as error:  # too few sentinel tokens for the text's length
            if trained is after:
                raise
            return error.message
        metrics, metadata = held_out.score(trained.precision).metrics(), data.text.metadata
        if "bits_per_byte" in metrics:
            values.append(metrics["bits_per_byte"])
            continue
        scores = word_and_byte_rates(
            metrics[f"{term}_loss"], metadata["tokens"], max(metadata["words"], 1), max(metadata["bytes"], 1)
        )
        values.append(scores["bits_per_byte"])
    return TextLoss(term, title, *values)


def _new_config(
    config: ImportConfig, hugging_face: HFFolder | None, saved: Mapping[str, object], weights: Weights
) -> JsonObject:
    if hugging_face is None:
        changes = {"checkpoint": masked(config.checkpoint), "name": None, "run_dir": None}
        return {**saved, **(changes if "objective" in saved else {})}
    source = masked_data({"checkpoint": config.checkpoint, "ignored_keys": list(weights.ignored)})
    version = {"version": saved_configs.VERSION, "command": IMPORT_COMMAND, "seed": 0}
    return {**version, "source": {**source, "revision": hugging_face.revision}, "model": saved["model"]}


def _report(
    folder: Path,
    mapping: Replacement,
    report: JsonMapping,
    loss: TextLoss | str,
    old_tokenizer: Tokenizer,
    new_tokenizer: Tokenizer,
) -> None:
    counts = mapping.counts
    additions = f"{counts['new']:,} new"
    if counts["new"]:
        additions += f" ({counts['without_old_pieces']:,} without old subwords: the mean of all entries)"
    rows = [("entries", f"{counts['kept']:,} kept · {additions} · {counts['dropped']:,} dropped")]
    if report["rows_without_entry"]:
        rows.append(("rows", f"{report['rows_without_entry']:,} unused rows stay after the entries"))
    rows.append(("tensors", ", ".join(report["tensors"])))
    if isinstance(loss, str):
        rows.append(("bits per byte", f"not measured: {loss}"))
    else:
        rows.append(("bits per byte", f"{loss.before:.4f} before · {loss.after:.4f} after · {loss.term}, {loss.text}"))
        old_text, new_text = (
            tokenizer.decode(tokenizer.encode(_NORMALIZATION_SAMPLE)) for tokenizer in (old_tokenizer, new_tokenizer)
        )
        if old_text != new_text:
            rows.append(
                ("", "not comparable: the tokenizers remove different characters, which add nothing to the loss")
            )
    output = Output()
    output.line(f"{folder} · {new_tokenizer.vocab_size:,} tokens instead of {old_tokenizer.vocab_size:,}")
    output.rows(rows)
