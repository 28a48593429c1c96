"""`lmtool export`: writes a checkpoint as a folder that transformers loads, reads it again with both, and reports every
difference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import lmtool
from lmtool.config.base import JsonMapping
from lmtool.config.registry import command_line
from lmtool.data.formats import with_format
from lmtool.errors import CheckFailed, UserError
from lmtool.models.configs import ModelConfig
from lmtool.reporting.console import Output
from lmtool.resolver.commands import ExportConfig
from lmtool.session.trained import classifies, read_trained
from lmtool.system.files import sha256, user_path
from lmtool.system.secrets import masked
from lmtool.system.terminal import counted
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import select_device, select_precision
from lmtool.weights.assemble import assemble
from lmtool.weights.comparing import (
    CheckpointComparison,
    compare_autotokenizer,
    compare_outputs,
    compare_tensors,
    compare_tokenizers,
    tied_names,
)
from lmtool.weights.conversion.parity import Parity, compare_texts, exported_format, parity, tokenizer_settings
from lmtool.weights.conversion.tuned import export_tuned, head_to_export
from lmtool.weights.conversion.word_vectors import export_vectors
from lmtool.weights.exporting import Export, export_of, write_export
from lmtool.weights.folders import HFFolder, hf_folder
from lmtool.weights.padded_model import load
from lmtool.weights.reading import Weights, ignored_warnings, read
from lmtool.weights.saved_model import merge_tuned, saved_config, saved_model
from lmtool.weights.sentence_encoders import sentence_encoder

_GENERATOR_ENDINGS = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "MTModel")
"""Endings of the names of transformers' classes that generate text."""


def run(config: ExportConfig) -> None:
    """Writes the folder if it gives the checkpoint's outputs when it is read again, and prints the differences. Raises
    CheckFailed, and writes nothing, if there are any."""
    if config.format == "vectors":
        export_vectors(config)
        return
    if config.format != "transformers":
        export_tuned(config)
        return
    loaded = load(config.checkpoint, offline=config.offline)
    if loaded.tokenizer is None:
        raise UserError(f"checkpoint={config.checkpoint} has no tokenizer", "use a checkpoint of lmtool")
    saved = saved_config(config.checkpoint, config.offline)
    weights = merge_tuned(read(config.checkpoint, config.offline), saved)
    if weights.merged:
        saved = {key: value for key, value in saved.items() if key != "tuning"}
    published = hf_folder(config.checkpoint, config.offline)
    if published is not None and classifies(published, weights):
        saved = published.classifier_config()
    task, trained, source_tokenizer = head_to_export(saved, weights.tensors), None, loaded.tokenizer
    tokenizer: Tokenizer = source_tokenizer
    if task is not None:
        trained = read_trained(config.checkpoint, config.offline, select_precision("fp32", select_device("cpu")))
        tokenizer = trained.tokenizer.with_padding()  # otherwise a decoder's classifier cannot read batches
    export = export_of(loaded.config, weights.tensors, task, tokenizer)
    require_published_tensors(weights, loaded.config, export)
    layout = exported_format(loaded.config, task, tokenizer)
    tokenizer = tokenizer if layout is None else with_format(tokenizer, layout)
    folder = user_path(config.output)
    card = model_card(config.checkpoint, weights, saved, export) + usage(export.architecture, loaded.config, folder)

    def compare(draft: Path) -> None:
        reloaded = load(str(draft), offline=True)
        copied = read(str(draft), offline=True)
        unused = [name for name in copied.tensors if name not in reloaded.model.parts.state_dict()]
        comparison = compare_tensors(export.lmtool_tensors, copied.tensors, unused)
        exported = replace(weights, tensors=export.lmtool_tensors)
        original, _ = assemble(
            saved_model(config.checkpoint, saved, export.lmtool_tensors), loaded.tokenizer, trained=exported
        )
        compare_outputs(comparison, original, reloaded.model.parts)
        if reloaded.tokenizer is not None:
            compare_tokenizers(comparison, source_tokenizer, reloaded.tokenizer)
        if layout is not None:
            learner = original if trained is None else cast(TaskLearner, trained.learner())
            compare_texts(comparison, learner, reloaded, draft, layout, tokenizer)
        comparison.tied = tied_names(original)
        if published is not None:
            warn_about(published, loaded.report.ignored, config.offline)
        parity_report = parity(draft, export.architecture, original, tokenizer)
        print_comparison(f"{folder} · {export.architecture}", comparison, export.left_out, parity_report)
        if not (comparison.same and parity_report.same):
            raise CheckFailed(
                f"what transformers would read from {folder} is not what was exported",
                "see the differences above; the folder was not written: use the run with lmtool, and report this",
            )
        Output().line(compare_autotokenizer(draft, tokenizer))

    settings = tokenizer_settings(loaded.config, saved, task, tokenizer)
    write_export(export, loaded.config, tokenizer, settings, card, folder, compare)


def require_published_tensors(weights: Weights, model: ModelConfig, export: Export) -> None:
    """Raises UserError if the backbone has tensors that published models lack."""
    unpublished = [
        name for name in weights.tensors if name.startswith("backbone.") and name not in export.lmtool_tensors
    ]
    if unpublished:
        more = f" and {counted(len(unpublished) - 1, 'more tensor')} have" if len(unpublished) > 1 else " has"
        raise UserError(
            f"checkpoint={weights.origin}: {unpublished[0]}{more} no counterpart in a published model={model.name}",
            "use the run with lmtool",
        )


def warn_about(published: HFFolder, ignored: Sequence[str], offline: bool) -> None:
    """Prints warnings about the parts of a published folder that are not copied with its model."""
    warnings = ignored_warnings(published.checkpoint, ignored)
    encoder = sentence_encoder(published, offline)
    if encoder is not None:
        pools = " and ".join([f"pooling={' + '.join(encoder.modes)}", *encoder.extra_steps])
        warnings.append(
            f"checkpoint={published.checkpoint} is a sentence encoder; the copy is its model without {pools}: "
            f"lmtool embed checkpoint={published.checkpoint} gives its vectors"
        )
    for warning in warnings:
        Output().warn(warning)


def print_comparison(
    heading: str, comparison: CheckpointComparison, left_out: tuple[str, ...] = (), parity_report: Parity | None = None
) -> None:
    """Prints a comparison. parity_report: the comparison with the outputs of transformers; None for none."""
    output = Output()
    output.line(heading)
    parity_rows = [] if parity_report is None else [parity_report.row()]
    output.rows([*comparison.rows(), *parity_rows, ("left out", ", ".join(left_out) or "nothing")])


def model_card(checkpoint: str, weights: Weights, saved: JsonMapping, export: Export) -> str:
    """Returns the README.md of the folder: the model, and the origin of its weights."""
    learned = saved.get("objective") or saved.get("task") or {}
    learned_name = learned.get("name")
    task = saved.get("task") or {}
    path = weights.folder / "model.safetensors"
    is_step = weights.folder.name.startswith("step_")
    title = weights.folder.parent.parent.name if is_step else weights.folder.name
    metadata = {
        "architecture": f"{export.architecture} ({saved['model']['name']})",
        "parameters": f"{sum(tensor.numel() for tensor in export.hf_tensors.values()):,}",
        "made by": command_line("export", f"checkpoint={checkpoint}") + f" (lmtool {lmtool.__version__})",
        "checkpoint": weights.folder.name,
        "sha256 of its weights": sha256(path) if path.is_file() else None,
        "trained by": f"lmtool {saved['command']}" if saved.get("command") else None,
        "learned": learned_name,
        "data": (saved.get("data") or {}).get("name") or task.get("hub") or task.get("path"),
        "seed": saved.get("seed"),
        "started from": saved.get("checkpoint") or (saved.get("source") or {}).get("checkpoint") or "random weights",
        "left out": ", ".join(export.left_out) or None,
    }
    rows = "".join(f"| {name} | {masked(str(value))} |\n" for name, value in metadata.items() if value is not None)
    return (
        f"---\nlibrary_name: transformers\n---\n\n# {title}\n\n"
        f"Weights exported by lmtool for transformers.\n\n| | |\n|---|---|\n{rows}"
    )


def usage(architecture: str, model: ModelConfig, folder: Path) -> str:
    """Returns the README.md block with the code for transformers. architecture: the exported class."""
    path, inputs = json.dumps(masked(str(folder))), '"A text."'
    if "QuestionAnswering" in architecture:
        inputs = '"A question?", "A text with its answer."'
    result = f'model(**tokenizer({inputs}, return_tensors="pt"))[0]'
    # XLNet's language model is an encoder here: it predicts tokens of the given text.
    if model.architecture != "encoder" and architecture.endswith(_GENERATOR_ENDINGS):
        result = f'tokenizer.decode(model.generate(**tokenizer({inputs}, return_tensors="pt"), max_new_tokens=20)[0])'
    return (
        f"\n```python\nfrom transformers import AutoTokenizer, {architecture}\n\n"
        f"tokenizer, model = AutoTokenizer.from_pretrained({path}), {architecture}.from_pretrained({path})\n"
        f"print({result})\n```\n"
    )
