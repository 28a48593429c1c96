"""`lmtool import`: turns a published folder, a PEFT adapter, ELMo's weights or word vectors into a checkpoint and lists
what was lost; also gives a checkpoint another vocabulary or another family. The parts are in weights/conversion/."""

from __future__ import annotations

from lmtool.commands.export import print_comparison, warn_about
from lmtool.errors import CheckFailed, UserError
from lmtool.resolver.commands import ImportConfig
from lmtool.session.trained import classifies, require_same_reading
from lmtool.system.files import user_path
from lmtool.weights.comparing import compare_outputs, compare_tensors, compare_tokenizers, tied_names
from lmtool.weights.conversion.adapters import import_adapter
from lmtool.weights.conversion.architectures import import_architecture
from lmtool.weights.conversion.elmo import elmo_files, import_elmo
from lmtool.weights.conversion.vocabularies import replace_tokenizer
from lmtool.weights.conversion.word_vectors import holds_vectors, import_as_embedding, import_vectors, is_word_file
from lmtool.weights.exporting import ImportedModel, write_import
from lmtool.weights.folders import hf_folder, weight_file
from lmtool.weights.padded_model import load
from lmtool.weights.peft.adapter import adapter_folder
from lmtool.weights.reading import read, read_hf, to_fp32, to_hf_names, to_lmtool_names


def run(config: ImportConfig) -> None:
    """Writes the checkpoint, reads it again, compares it with the folder, and prints the differences."""
    path = user_path(config.checkpoint)
    if config.model is not None:
        (import_as_embedding if holds_vectors(config) else import_architecture)(config, config.model)
        return
    if is_word_file(path):
        require_no_vocabulary(config, "a file of word vectors")
        import_vectors(config, path)
        return
    elmo = elmo_files(config.checkpoint)
    if elmo is not None:
        require_no_vocabulary(config, "published weights of ELMo")
        import_elmo(config, elmo)
        return
    adapter = adapter_folder(config.checkpoint, config.offline)
    if config.tokenizer is not None and adapter is None:
        replace_tokenizer(config, config.tokenizer)
        return
    require_no_vocabulary(config, "an adapter of PEFT")
    if adapter is not None:
        import_adapter(config, adapter)
        return
    published = hf_folder(config.checkpoint, config.offline)
    if published is None:
        raise UserError(
            f"checkpoint={config.checkpoint} is not a published folder: no config.json with a model_type",
            "use a folder with config.json and model.safetensors, or hf://org/name@revision",
        )
    loaded = load(config.checkpoint, offline=config.offline)
    state, saved = loaded.model.parts.state_dict(), published.saved_config()
    if classifies(published, read(config.checkpoint, config.offline)):
        saved = published.classifier_config()
        if loaded.tokenizer is not None:
            require_same_reading(published, loaded.config, loaded.tokenizer)
    folder = user_path(config.output)
    source = {
        "checkpoint": config.checkpoint,
        "revision": published.revision,
        "file": weight_file(published, config.offline).name,
        "ignored_keys": list(loaded.report.ignored),
    }
    warn_about(published, loaded.report.ignored, config.offline)
    write_import(ImportedModel(state, loaded.config, loaded.tokenizer, source, saved), folder)

    reloaded = load(str(folder), offline=True)
    published_rows = to_fp32(read_hf(published, config.offline))
    # Compared under the published names: the tensors of the folder, and those of the checkpoint converted back.
    converted = to_hf_names(reloaded.config, reloaded.model.parts.state_dict())
    published_tensors = to_hf_names(reloaded.config, to_lmtool_names(published, published_rows))
    hf_names = {name for name in published_tensors if not name.startswith(("heads.", "backbone."))}
    unused = sorted(hf_names - set(converted))
    expected = {name: published_tensors[name] for name in published_tensors if name in hf_names & set(converted)}
    comparison = compare_tensors(expected, converted, unused)
    compare_outputs(comparison, loaded.model.parts, reloaded.model.parts)
    if loaded.tokenizer is not None and reloaded.tokenizer is not None:
        compare_tokenizers(comparison, loaded.tokenizer, reloaded.tokenizer)
    comparison.tied = tied_names(reloaded.model.parts)
    print_comparison(f"{folder} · model={loaded.config.name} · {loaded.report.sentence()}", comparison)
    if not comparison.same:
        raise CheckFailed(
            f"{folder} is not what was imported",
            "see the differences above; keep the published folder, because the import does not replace it",
        )


def require_no_vocabulary(config: ImportConfig, kind: str) -> None:
    """Raises UserError if a key for replacing a vocabulary is set. kind: the kind of the checkpoint,
    which has a vocabulary of its own."""
    if config.tokenizer is not None or config.data is not None:
        message = "data= measures the loss after replacing a vocabulary, but tokenizer= is not set"
        if config.tokenizer is not None:
            message = (
                f"tokenizer={config.tokenizer} needs a pretrained run, but checkpoint={config.checkpoint} is {kind}"
            )
        raise UserError(
            message, "set checkpoint=runs/NAME of a pretrained run and tokenizer=FOLDER to replace its tokenizer"
        )
