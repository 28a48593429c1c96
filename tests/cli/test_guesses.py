"""First guesses of people who know other tools: each hint names what to type here."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtool.cli import main as cli

SCRATCH = "finetune task=pydocs checkpoint=none model=bert_tiny"
COMMANDS = {
    "attention RUN": "lmtool inspect attention checkpoint=RUN",
    "compare RUN RUN": "lmtool report RUN RUN (compares runs)",
    "diff RUN RUN": "lmtool report RUN RUN (compares runs)",
    "plot RUN": "lmtool report RUN (draws its curves)",
    "tensorboard": "logger=tensorboard",
    "sweep finetune": "finetune -m task=sst2,cola seed=1,2",
    "grid": "finetune -m task=sst2,cola seed=1,2",
    "data wiki.txt": "lmtool check FILE",
    "dataset wiki.txt": "lmtool check FILE",
    "distill teacher=RUN": "distill=soft distill.teacher=RUN",
    "tokenize text": "lmtool inspect tokenizer",
    "serve RUN": "there is no server",
    "push RUN": "nothing is uploaded",
    "similarity a b": "lmtool embed RUN",
    "encode text": "lmtool embed",
    "delete RUN": "lmtool runs prune",
    "clean": "lmtool runs prune",
    "train": "lmtool pretrain or lmtool finetune",
    "eval RUN": "lmtool evaluate",
    "test RUN": "lmtool evaluate",
    "infer RUN": "lmtool predict",
    "chat RUN": "lmtool generate",
    "convert RUN": "lmtool export or lmtool import",
    "download task=sst2": "lmtool fetch",
    "ls": "lmtool runs",
    "env": "lmtool doctor",
    "debug pretrain": "lmtool inspect",
    "explain optimizer.lr": "lmtool show",
    "pretrian": "lmtool pretrain",
    "models": "lmtool list model",
    "fill-mask": "lmtool predict",
    "perplexity": "lmtool evaluate",
    "neighbours": "lmtool inspect word",
    "visualize": "lmtool inspect attention",
    "preprocess": "lmtool tokenizer",
    "rm": "lmtool runs prune",
    "push_to_hub": "lmtool export RUN",
    "summary": "lmtool plan pretrain model=NAME",
    "init": "lmtool pretrain experiment=bert_tiny",
    "quantize": "lmtool export RUN",
    "inspect heads": "tokenizer, attention, positions, word",
}
FLAGS = {
    "predict --model RUN text=hi": "checkpoint=hf://RUN",
    "embed text.txt -o v.npy": "output=v.npy",
    "export RUN --onnx": "lmtool export RUN output=FOLDER",
    "report RUN --latex": "format=latex",
    "pretrain --lr 1e-4": "optimizer.lr=1e-4",
    "pretrain --fp16": "precision=fp16",
    "finetune --num_train_epochs 3": "max_epochs=3",
    "finetune --output_dir out": "run_dir=out",
    "pretrain --verbose": "--debug",
}
KEYS = {
    f"{SCRATCH} tuning.method=lora": "tuning=lora",
    f"{SCRATCH} method=lora": "tuning=lora",
    f"{SCRATCH} distill=runs/teacher": "distill=soft distill.teacher=runs/teacher",
    f"{SCRATCH} metric=f1": "task.metric=f1",
    f"{SCRATCH} dev=dev.csv": "train.csv, dev.csv and test.csv",
    f"{SCRATCH} test=test.csv": "train.csv, dev.csv and test.csv",
    f"{SCRATCH} -m seed=0..4": "seed=0,1,2,3,4 with -m",
    f"{SCRATCH} seed=1-3": "seed=1,2,3 with -m",
    f"{SCRATCH} freeze=true": "tuning=head",
    f"{SCRATCH} freeze_encoder=true": "tuning=head",
    f"{SCRATCH} max_eval_samples=100": "evaluate_rows=100",
    f"{SCRATCH} epochs=2": "max_epochs=2",
    f"{SCRATCH} batch_size=8": "batch_examples=8",
    f"{SCRATCH} lora_r=4": "tuning=lora tuning.rank=4",
    f"{SCRATCH} lr=1e-5": "optimizer.lr=1e-05",
    f"{SCRATCH} warmup_ratio=0.1": "schedule.warmup_fraction=0.1",
    "pretrain resume=runs/a": "lmtool resume runs/a",
    "pretrain vocab_size=2000": "tokenizer.vocab_size=2000",
    "pretrain model=runs/a": "checkpoint=runs/a",
    "pretrain model=bertt": "model=bert",
    "pretrain tokenizer=runs/a": "tokenizer=folder tokenizer.path=runs/a",
    "pretrain n_layer=2": "model.num_layers=2",
    "pretrain block_size=64": "max_length=64",
    "pretrain max_iters=10": "max_steps=10",
    "show bert": "lmtool show model=bert",
    f"{SCRATCH} lora=true": "tuning=lora",
    f"{SCRATCH} seq_len=64": "max_length=64",
    "finetune data=text": "task=FILE",
    "pretrain model=word2vec": "model=word_vectors",
    "inspect positions kinds=[rope]": "did you mean rotary?",
    "predict RUN question=Who": "text=Who",
    "predict RUN text=Who context=There": "pair=There",
    "evaluate RUN split=test": "task.path=FILE",
    "inspect word RUN": "set word=",
}
GUESSES = COMMANDS | FLAGS | KEYS


@pytest.mark.parametrize("line", GUESSES)
def test_hint_says_what_to_type(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 2
    shown = capsys.readouterr().err
    hints = [text for text in shown.splitlines() if text.startswith("hint: ")]
    assert any(GUESSES[line] in hint for hint in hints), shown
    assert all(len(text) < 400 for text in shown.splitlines())


@pytest.mark.parametrize("text", ["task.text=docstring", "task.text=[docstring]"])
def test_name_of_one_column_is_read_as_list(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SCRATCH.split(), text, "--cfg", "job"]) == 0
    assert "  text:\n  - docstring\n" in capsys.readouterr().out


FILE = """
model: {name: bert_tiny, num_layers: 1}
max_steps: 5
optimizer: {lr: 2e-4, betas: [0.9, 0.98]}
data: text
data.path: "a b, c.txt"
seed: 3
"""


def test_file_of_some_keys_is_composed_over_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(FILE)
    assert cli.main(["pretrain", "--config", "my.yaml", "seed=4", "--cfg", "job"]) == 0
    from_file = capsys.readouterr().out
    words = "model=bert_tiny model.num_layers=1 max_steps=5 optimizer.lr=2e-4 optimizer.betas=[0.9,0.98] data=text"
    assert cli.main(["pretrain", *words.split(), 'data.path="a b, c.txt"', "seed=4", "--cfg", "job"]) == 0
    assert capsys.readouterr().out == from_file
    # A typed key is chosen over that of the file.
    assert "seed: 4" in from_file
    Path("my.yaml").write_text("model: bertt\nnum_steps: 2\n")
    assert cli.main(["pretrain", "--config", "my.yaml"]) == 2
    shown = capsys.readouterr().err
    assert "did you mean model=bert?" in shown and "did you mean max_steps=2?" in shown
