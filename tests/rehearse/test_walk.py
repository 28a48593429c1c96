"""Whole commands on the simulated device: every family by precision, dropout and compile=, every objective, tuning
method, optimizer, distillation mode, task kind and command, and two ranks. No step makes the host wait, no operation
mixes devices, and matrix products have the type of the precision."""

from __future__ import annotations

import json
import math
import os
import shlex
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import matrix

from lmtool.cli import main as cli
from lmtool.config.registry import lookup
from lmtool.costs.rate import measure_bandwidth
from lmtool.training.health import Health
from tests.commands.conftest import CONF, finetune, merge_overrides, pretrain, skip_reports, text, tiny, write_rows

pytestmark = pytest.mark.rehearse

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = matrix.FAMILIES
SHORT = ["device=cuda", "compile=false", "max_steps=2", "evaluate_every=2", "log_every=2"]
TEXT = [*SHORT, "data.document=block", "data.validation_fraction=0.2", "batch_tokens=128"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with text, rows of every task kind, and the runs of all tests."""
    place = tmp_path_factory.mktemp("walk")
    (place / "text.txt").write_text("\n\n".join(text().split("\n\n")[:30]))
    write_rows(place / "rows")
    matrix.write_rows(place)
    return place


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    skip_reports(monkeypatch)
    monkeypatch.setattr("lmtool.session.companions.SAMPLES", 1)  # number of texts generated at the end


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def require_no_wait(device, *permitted: str, phases: tuple[str, ...] = ("step",)) -> None:
    """Asserts that the host did not wait. permitted: lines of lmtool with unavoidable waits."""
    waits = [(what, where.line) for what, where in device.waits if where.phase in phases]
    assert not [wait for wait in waits if not wait[1].startswith(permitted)], waits


def fields_of(family: str) -> set[str]:
    entry = lookup("model", family)
    assert entry is not None
    return set(entry.config.model_fields)


def words_of(family: str, dropout: float = 0.0, attention_dropout: float = 0.0) -> list[str]:
    rates = {"dropout": dropout, "attention_dropout": attention_dropout}
    return [f"model.{name}={rate}" for name, rate in rates.items() if name in fields_of(family)]


def trained(name: str, family: str, *words: str) -> Path:
    return pretrain(name, *TEXT, *words, model=f"{family}_tiny")


# Tiled attention, which a GPU replaces by kernels, computes in fp32, as do recurrent layers.
WIDE = ("nn/tiled.py", "nn/recurrent.py")


def losses_on_cpu(family: str) -> list[float]:
    """The losses of an fp32 run on the CPU without dropout, trained once per session."""
    name = f"{family}_cpu"
    if not Path("runs", name).exists():
        trained(name, family, *words_of(family), "device=cpu")
    return losses(Path("runs", name))


# Rounding of fp32 and bf16. Compilers are not simulated, but the functions to be compiled run.
TOLERANCES = {"precision=fp32": 1e-5, "precision=bf16": 1e-2, "compile=true": 1e-5}


@pytest.mark.parametrize("words", TOLERANCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_matches_cpu(family, words, cuda):
    on_cpu = losses_on_cpu(family)
    assert all(map(math.isfinite, on_cpu))
    cuda.products.clear()
    own = losses(trained(f"{family}_{words.partition('=')[2]}", family, *words_of(family), "precision=fp32", words))
    assert own == pytest.approx(on_cpu, rel=TOLERANCES[words])
    require_no_wait(cuda, phases=("step", "evaluation"))
    if words == "precision=bf16":
        wide = {where.line for (kind, where) in cuda.products if kind != "bfloat16" and where.phase == "step"}
        permitted = {line for line in wide if line.startswith(WIDE)}
        assert not wide - permitted - ({"backward"} if permitted else set()), wide


@pytest.mark.parametrize("family", [family for family in FAMILIES if "dropout" in fields_of(family)])
def test_family_trains_with_dropout_in_compiled_regions(family, cuda):
    """Compiled regions read the generator state from tensors."""
    words = [*words_of(family, 0.1), "precision=bf16", "compile=true"]
    assert all(map(math.isfinite, losses(trained(f"{family}_compiled", family, *words))))
    require_no_wait(cuda)


@pytest.mark.parametrize("words", ["precision=bf16", "precision=fp16"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if "dropout" in fields_of(family)])
def test_family_trains_with_dropout(family, words, cuda):
    run = trained(f"{family}_{words[-4:]}_drops", family, *words_of(family, 0.1), words)
    assert all(map(math.isfinite, losses(run)))
    # Torch's scaler reads whether gradients are finite, except for fused optimizers, which check on the device.
    fused = yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["name"] in ("adam", "adamw")
    require_no_wait(cuda, *(["training/step.py"] if words == "precision=fp16" and not fused else []))


@pytest.mark.parametrize("family", [family for family in FAMILIES if "attention_dropout" in fields_of(family)])
def test_family_trains_with_attention_dropout(family, cuda):
    words = words_of(family, 0.1, 0.1)
    assert all(map(math.isfinite, losses(trained(f"{family}_weights", family, *words, "precision=bf16"))))
    require_no_wait(cuda)


def test_adaptive_softmax_does_not_wait(cuda):
    """With tokens of several clusters."""
    words = ["model.cutoffs=[20,40]", *words_of("transformer_xl"), "precision=bf16"]
    trained("adaptive", "transformer_xl", *words)
    require_no_wait(cuda, phases=("step", "evaluation"))


# --- objectives and optimizers -------------------------------------------------------------------------------------

OF_FAMILIES = {
    "bilm": "elmo", "clm": "gpt", "denoising": "bart", "mntp": "gpt", "plm": "xlnet", "prefix_lm": "gpt",
    "rtd": "electra", "sequence_autoencoder": "lstm", "skip_gram": "word_vectors", "span_corruption": "t5",
    "glove": "word_vectors",
}  # fmt: skip
"""The family for each prefix of objective names; bert for others."""


def presets(group: str, *without: str) -> list[str]:
    """The YAML files of a group."""
    return [path.stem for path in sorted((CONF / group).glob("*.yaml")) if path.stem not in without]


@pytest.mark.parametrize("objective", presets("objective", "auto", "mixture", "task"))
def test_objective_does_not_wait(objective, cuda):
    family = next((of for name, of in OF_FAMILIES.items() if objective.startswith(name)), "bert")
    mask_token = ["tokenizer.special_tokens=roberta"] if objective.startswith("mntp") else []
    trained(f"objective_{objective}", family, f"objective={objective}", "precision=bf16", *mask_token)
    require_no_wait(cuda)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", presets("optimizer", "auto"))
def test_optimizer_does_not_wait(optimizer, precision, cuda):
    trained(f"optimizer_{optimizer}_{precision}", "bert", f"optimizer={optimizer}", f"precision={precision}")
    require_no_wait(cuda)


# --- finetuning ----------------------------------------------------------------------------------------------------


def start(family: str) -> str:
    """The override `checkpoint=` with a checkpoint of the family, trained on the CPU."""
    name = f"start_{family}"
    if not Path("runs", name).exists():
        trained(name, family, "device=cpu", "model.num_layers=4")
    return f"checkpoint=runs/{name}"


def teacher() -> str:
    """The run folder of a classifier, trained on the CPU."""
    if not Path("runs/teacher").exists():
        finetune("teacher", start("bert"), *SHORT, "device=cpu")
    return "runs/teacher"


WITHOUT_BIASES = ("t5", "modernbert")


@pytest.mark.parametrize(
    ("method", "family"),
    [
        (method, family)
        for method, family in product(matrix.METHODS, ["bert", "gpt", "t5", "modernbert"])
        if not (method == "bitfit" and family in WITHOUT_BIASES)
    ],
)
def test_tuning_method_does_not_wait(method, family, cuda):
    name = f"{family}_{''.join(filter(str.isalnum, method))}"
    finetune(name, start(family), *SHORT, "precision=bf16", *matrix.METHODS[method])
    require_no_wait(cuda)


MODES = {
    "standard": ["distill.terms.hard.weight=1"],
    "sequence": ["task=seq2seq", "task.path=seq2seq", *matrix.COLUMNS["seq2seq"]],
}
"""Further overrides of a distillation mode."""


@pytest.mark.parametrize("mode", presets("distill", "none"))
def test_distillation_mode_does_not_wait(mode, cuda):
    words = [*SHORT, "precision=bf16", f"distill={mode}", *MODES.get(mode, [])]
    if mode == "sequence":
        if not Path("runs/writer").exists():
            finetune("writer", start("t5"), *SHORT, "device=cpu", *MODES[mode])
        finetune("by_sequence", start("t5"), *words, "distill.teacher=runs/writer")
    else:
        own = [] if mode in ("self", "codistillation") else [f"distill.teacher={teacher()}"]
        begin = ["checkpoint=none", "model=bert_tiny", "model.num_layers=2", "model.hidden_size=32"]
        sizes = ["model.num_heads=2", "model.feedforward_size=64", "model.vocab_size=400"]
        finetune(f"by_{mode}", *begin, *sizes, *words, *own)
    require_no_wait(cuda)


@pytest.mark.parametrize("kind", matrix.KINDS)
def test_task_kind_finetunes_evaluates_and_predicts(kind, cuda):
    """Finetuned, evaluated, and used for predictions."""
    words = [f"task={kind}", f"task.path={kind}", *matrix.COLUMNS[kind], "max_length=48"]
    family = "t5" if kind == "seq2seq" else "bert"
    run = finetune(f"of_{kind}", start(family), *SHORT, "precision=bf16", *words)
    require_no_wait(cuda)
    assert cli.main(["evaluate", str(run), "device=cuda"]) == 0
    assert cli.main(["predict", str(run), f"input={kind}/dev.jsonl", "device=cuda"]) == 0


# --- commands ------------------------------------------------------------------------------------------------------

COMMANDS = {
    "evaluate": "evaluate runs/teacher",
    "predict": "predict runs/teacher text='The happy cat'",
    "fill": "predict runs/start_bert text='The happy [MASK] saw'",
    "generate": "generate runs/start_gpt prompt='The happy' max_new_tokens=6",
    "generate beams": "generate runs/start_gpt prompt='The happy' max_new_tokens=6 beams=3",
    "generate sampled": "generate runs/start_gpt prompt='The happy' max_new_tokens=12 min_new_tokens=9 temperature=0.8 "
    "top_p=0.9 no_repeat_ngram=2 repetition_penalty=1.2",
    "generate t5": "generate runs/start_t5 prompt='The happy' max_new_tokens=6",
    "embed": "embed runs/start_bert text='The happy cat'",
    "probe": "probe runs/start_bert target=sst2 task=sst2 task.path=rows",
    "inspect": "inspect pretrain model=bert_tiny data=text data.path=text.txt data.document=block n=2",
    "inspect attention": "inspect attention runs/start_bert text='The happy cat'",
    "inspect word": "inspect word checkpoint=runs/start_bert word=cat text='The cat sat. | A cat.'",
    "doctor": "doctor trains=false",
    "profile": "profile pretrain model=bert_tiny model.hidden_size=32 model.num_heads=2 model.feedforward_size=64 "
    "model.vocab_size=400 max_length=32 batch_tokens=128 data=text data.path=text.txt data.document=block",
    "profile generate": "profile generate runs/start_gpt prompt='The happy' max_new_tokens=10 min_new_tokens=10",
    "plan": "plan finetune task=sst2 task.path=rows checkpoint=runs/start_bert",
}
WITHOUT_DEVICE = ("inspect", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_does_not_wait(command, cuda):
    for family in ("bert", "gpt", "t5"):
        if f"start_{family}" in COMMANDS[command]:
            start(family)
    if "teacher" in COMMANDS[command]:
        teacher()
    words = shlex.split(COMMANDS[command]) + ([] if command in WITHOUT_DEVICE else ["device=cuda"])
    assert cli.main(words) == 0
    require_no_wait(cuda)
    # Tokens are received several steps at a time, which is no operation.
    assert not [where.line for _, where in cuda.waits if where.line.startswith("learners/generation")]


def test_run_resumes_without_waits(cuda):
    for steps in (1, 3):
        run = trained("resumed", "bert", "precision=bf16", f"max_steps={steps}")
    assert json.loads((run / "result.json").read_text())["steps"] == 3
    require_no_wait(cuda)


def test_two_ranks_match_one(cuda):
    """Two machines with one device each sum their gradients with DDP."""
    more = [*TEXT, *words_of("bert"), "log_every=1"]
    alone = losses(trained("alone", "bert", *more))
    words = ["pretrain", "model=bert_tiny", *tiny("bert_tiny"), "data=text", "data.path=text.txt", "cache_dir=cache"]
    command = [sys.executable, "-m", "tests.rehearse", *merge_overrides(words, [*more, "name=together"])]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    path = {"PYTHONPATH": str(ROOT), "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command, env=os.environ | group | path | {"RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed  # 1 where a step waits
    assert "operations that the host waited for" in printed[0]
    assert losses(Path("runs/together")) == pytest.approx(alone, rel=1e-5)


def replace_watched_loss(monkeypatch, change):
    """Replaces the loss that `Health` watches. change: (step, loss) to loss."""
    real = Health.watch

    def watch(self, step, cursor, loss, norm, scaled):
        real(self, step, cursor, change(step, loss), norm, scaled)

    monkeypatch.setattr(Health, "watch", watch)


def test_late_check_names_the_step_with_the_non_finite_loss(cuda, monkeypatch, capsys):
    """On CUDA, losses are checked when a row is logged; the report names the batch of the earlier step."""
    replace_watched_loss(monkeypatch, lambda step, loss: loss * math.nan if step == 3 else loss)
    pretrain("late", *TEXT, "max_steps=400", "log_every=8", "evaluate_every=8", "precision=bf16", status=4)
    error = capsys.readouterr().err
    assert "the loss or gradient of step 3 is not finite" in error and "precision=fp32" in error
    (saved,) = Path("runs/late/diverged").glob("*.json")
    assert saved.name == "step_00000003.json" and json.loads(saved.read_text())["lengths"]


def test_bandwidth_buffers_exceed_the_cache(cuda):
    measure_bandwidth.cache_clear()
    assert measure_bandwidth("cuda:0", 1) > 0
    assert cuda.peak > 2 * 126e6  # a B200's second level


def test_wait_in_a_step_is_reported_once(cuda, monkeypatch, capsys):
    """After the first steps, with its line, on the screen and in the log."""

    def read_loss(step, loss):
        assert float(loss) > 0  # waits
        return loss

    replace_watched_loss(monkeypatch, read_loss)
    run = trained("waiting", "bert", "precision=bf16", "max_steps=6", "evaluate_every=3")
    line = Path(__file__).read_text().splitlines().index("        assert float(loss) > 0  # waits") + 1
    warning = f"warning: {__file__}:{line} makes the host wait for the device in a step, which leaves the device idle"
    assert [text for text in capsys.readouterr().err.splitlines() if "host wait" in text] == [warning]
    assert (run / "log.txt").read_text().count("host wait") == 1


def test_steps_without_waits_report_nothing(cuda, capsys):
    trained("quiet", "bert", "precision=bf16", "max_steps=6", "evaluate_every=3")
    assert "wait" not in capsys.readouterr().err
    assert torch.cuda.get_sync_debug_mode() == 0
