"""`lmtool import tokenizer=`: a pretrained checkpoint with another vocabulary, and what that costs on a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lmtool.config import saved as saved_configs
from lmtool.config.tables import build
from lmtool.errors import CheckFailed, UserError
from lmtool.learners.held_out import EVALUATION_TOKENS, HeldOutSplits
from lmtool.learners.metrics.texts import of_text
from lmtool.reporting.console import Output
from lmtool.resolver.matcher import missing_token, tokens_around
from lmtool.resolver.schema.run import EvaluateConfig, ImportConfig, PretrainConfig
from lmtool.session.evaluation import text_to_score
from lmtool.session.start import hub_tokenizer, require_fit
from lmtool.session.trained import Trained, classifies, read_trained
from lmtool.system.secrets import masked, masked_data
from lmtool.tokenizers.configs import FolderConfig
from lmtool.tokenizers.published import has_tokenizer
from lmtool.tokenizers.replacing import Replacement, replacement
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import choose_device, choose_precision
from lmtool.weights.exporting import require_new
from lmtool.weights.folders import PublishedFolder, published_folder
from lmtool.weights.importing import COMMAND, write_checkpoint
from lmtool.weights.load import saved_config, saved_model
from lmtool.weights.reading import Weights, read
from lmtool.weights.vocabularies import replaced_rows, vocabulary_tensors, with_vocabulary

REPORT = "replaced.json"
_CLEANED = "A  b\n\tÉ"


@dataclass(frozen=True)
class TextLoss:
    """term: what is predicted, as the learner calls it. text: on which. before, after: bits a byte of the text, were
    each of its tokens predicted as those of the term are."""

    term: str
    text: str
    before: float
    after: float


def replace_tokenizer(config: ImportConfig, tokenizer_path: str) -> None:
    """Write the checkpoint with the other vocabulary, read it again, and print what changed.

    UserError where the checkpoint was tuned, or the vocabulary lacks what the checkpoint's objective needs.
    """
    folder = Path(config.output).expanduser()
    require_new(folder)
    published = published_folder(config.checkpoint, config.offline)
    saved, weights = saved_config(config.checkpoint, config.offline), read(config.checkpoint, config.offline)
    _require_pretrained(config, published, saved, weights)
    parses = bool((saved.get("tokenizer") or {}).get("parse_special_tokens"))
    old = Tokenizer.load(weights.folder, parses)
    new = _tokenizer(FolderConfig(path=tokenizer_path, parse_special_tokens=parses), config.offline)

    trained = _with_head(config, saved, weights)
    blueprint: Any = saved_model(config.checkpoint, saved, weights.tensors)
    if trained is not None and "objective" in saved:
        blueprint = trained.config  # its heads are those of the objective
    model = blueprint.model
    if old.vocab_size > model.vocab_size:
        message = f"its tokenizer has {old.vocab_size:,} tokens, its table {model.vocab_size:,} rows"
        raise UserError(f"checkpoint={config.checkpoint}: {message}", "copy the tokenizer it was trained with there")
    mapping = replacement(old, new)
    rows = new.vocab_size + model.vocab_size - old.vocab_size
    _require_roles(trained, with_vocabulary(model, rows), new, tokenizer_path)
    larger = _resized(blueprint, model.vocab_size + 1)
    names = vocabulary_tensors(blueprint, larger, weights.tensors.keys())
    names = [name for name in names if name in weights.tensors]
    tensors = replaced_rows(weights.tensors, names, mapping)
    loss: TextLoss | str = "the checkpoint has no head that predicts tokens"
    if trained is not None:
        resized = _resized(trained.config, rows)
        changed = replace(trained, config=resized, tokenizer=new, weights=replace(weights, tensors=tensors))
        loss = _measured(config, trained, changed)

    report = {
        "checkpoint": masked(config.checkpoint),
        "tokenizer": masked(tokenizer_path),
        **mapping.counts,
        "rows_without_entry": model.vocab_size - old.vocab_size,
        "tensors": names,
        "bits_per_byte": None if isinstance(loss, str) else asdict(loss),
    }
    section = {"name": "folder", "path": masked(str(folder)), "parse_special_tokens": parses}
    described = _described(config, published, saved, weights)
    described |= {"model": {**described["model"], "vocab_size": rows}, "tokenizer": section}
    write_checkpoint(described, tensors, new, folder, {REPORT: report})
    again = read(str(folder), offline=True)
    if again.tensors.keys() != tensors.keys() or not all(
        torch.equal(tensor, again.tensors[name]) for name, tensor in tensors.items()
    ):
        raise CheckFailed(f"{folder} is not what was written", "see the disk, and keep the checkpoint")
    _tell(folder, mapping, report, loss, old, new)


def _require_pretrained(
    config: ImportConfig, published: PublishedFolder | None, saved: Mapping[str, Any], weights: Weights
) -> None:
    hint = "replace the tokenizer of the pretrained checkpoint, and finetune that"
    if saved.get("tuning") or saved.get("task") or saved.get("command") == "finetune":
        raise UserError(f"tokenizer={config.tokenizer}: checkpoint={config.checkpoint} was finetuned", hint)
    if published is not None and classifies(published, weights):
        raise UserError(f"tokenizer={config.tokenizer}: checkpoint={config.checkpoint} has the head of a task", hint)
    if not has_tokenizer(weights.folder):
        raise UserError(
            f"tokenizer={config.tokenizer}: checkpoint={config.checkpoint} has no tokenizer that could be replaced",
            "copy its tokenizer files there too",
        )


def _tokenizer(config: FolderConfig, offline: bool) -> Tokenizer:
    """UserError naming the key that is typed here."""
    try:
        tokenizer: Tokenizer = hub_tokenizer(config, offline) or build(config, (), 0)
        return tokenizer
    except UserError as error:
        raise UserError(error.message.replace("tokenizer.path=", "tokenizer="), error.hint) from error


def _with_head(config: ImportConfig, saved: Mapping[str, Any], weights: Weights) -> Trained | None:
    """The checkpoint with the head of its pretraining; None of a published encoder without one."""
    model = saved_model(config.checkpoint, saved, weights.tensors).model
    encoder = model.architecture == "encoder" and "objective" not in saved
    if encoder and not any(name.startswith("heads.masked_lm.") for name in weights.tensors):
        return None
    precision = choose_precision("fp32", choose_device("auto"))
    return read_trained(config.checkpoint, config.offline, precision)


def _require_roles(trained: Trained | None, model: Any, new: Tokenizer, path: str) -> None:
    hint = "give one that has it: `lmtool tokenizer` with the kind of the model, or with tokenizer.special_tokens="
    if trained is None:
        problem = missing_token(tokens_around(model), new.roles)
        if problem is not None:
            raise UserError(f"tokenizer={path} {problem}", hint)
        return
    try:
        require_fit(_resized(trained.config, model.vocab_size), new)
    except UserError as error:
        raise UserError(f"tokenizer={path}: {error.message}", hint) from error


def _resized(blueprint: Any, rows: int) -> Any:
    """A configuration, or a saved model, with a vocabulary of another size."""
    model = with_vocabulary(blueprint.model, rows)
    if isinstance(blueprint, PretrainConfig):
        return blueprint.model_copy(update={"model": model})
    return replace(blueprint, model=model)


def _measured(config: ImportConfig, before: Trained, after: Trained) -> TextLoss | str:
    """Both on the same text; or why the checkpoint as it was has no loss there."""
    values: list[float] = []
    term = title = ""
    for trained in (before, after):
        assert isinstance(trained.config, PretrainConfig)
        asked = EvaluateConfig(
            checkpoint=config.checkpoint, data=config.data, cache_dir=config.cache_dir, offline=config.offline
        )
        data, title = text_to_score(asked, trained, trained.config)
        learner, length = trained.learner(), trained.config.max_length
        terms = [name for name in learner.weights if name not in trained.tasks]
        if not terms:
            return "its objective predicts no tokens of text"
        term = terms[0]
        budget = max(EVALUATION_TOKENS, length)
        try:
            held_out = HeldOutSplits(learner, {"validation": data}, length, budget, trained.config.seed)
        except UserError as error:  # too few sentinels for its length
            if trained is after:
                raise
            return error.message
        metrics, facts = held_out.score(trained.precision).metrics(), data.text.facts
        if "bits_per_byte" in metrics:
            values.append(metrics["bits_per_byte"])
            continue
        scores = of_text(metrics[f"{term}_loss"], facts["tokens"], max(facts["words"], 1), max(facts["bytes"], 1))
        values.append(scores["bits_per_byte"])
    return TextLoss(term, title, *values)


def _described(
    config: ImportConfig, published: PublishedFolder | None, saved: Mapping[str, Any], weights: Weights
) -> dict[str, Any]:
    """The configuration of the new checkpoint: that of the run, or of an import."""
    if published is None:
        own = {"checkpoint": masked(config.checkpoint), "name": None, "run_dir": None} if "objective" in saved else {}
        return {**saved, **own}
    source = masked_data({"checkpoint": config.checkpoint, "ignored_keys": list(weights.ignored)})
    version = {"version": saved_configs.VERSION, "command": COMMAND, "seed": 0}
    return {**version, "source": {**source, "revision": published.revision}, "model": saved["model"]}


def _tell(
    folder: Path, mapping: Replacement, report: Mapping[str, Any], loss: TextLoss | str, old: Tokenizer, new: Tokenizer
) -> None:
    counts = mapping.counts
    made = f"{counts['new']:,} new"
    if counts["new"]:
        made += f" ({counts['without_old_pieces']:,} without old pieces: the mean of all entries)"
    rows = [("entries", f"{counts['kept']:,} kept · {made} · {counts['dropped']:,} dropped")]
    if report["rows_without_entry"]:
        rows.append(("rows", f"{report['rows_without_entry']:,} that no token has stay behind the entries"))
    rows.append(("tensors", ", ".join(report["tensors"])))
    if isinstance(loss, str):
        rows.append(("bits per byte", f"not measured: {loss}"))
    else:
        rows.append(("bits per byte", f"{loss.before:.4f} before · {loss.after:.4f} after · {loss.term}, {loss.text}"))
        if old.decode(old.encode(_CLEANED)) != new.decode(new.encode(_CLEANED)):
            rows.append(("", "the two keep different parts of a text: what one cleans away, or lacks, costs nothing"))
    output = Output()
    output.line(f"{folder} · {new.vocab_size:,} tokens in the place of {old.vocab_size:,}")
    output.rows(rows)
