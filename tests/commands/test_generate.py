"""`lmtool generate`: prompts from the command line and files, reproducible samples, and filled sentinels."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest

import lmtool
from lmtool.cli import main as cli
from lmtool.commands import generate as generate_command
from lmtool.learners.generation.decoding import Decoding
from lmtool.learners.generation.strategies import Request, Sampling
from lmtool.session.unfinished import UnfinishedOutput
from lmtool.system.terminal import visible
from tests.commands.conftest import merge_overrides, pretrain
from tests.weights.published_folders import make


def generate(*words: str, status: int = 0) -> None:
    assert cli.main(merge_overrides(["generate", "device=cpu", "precision=fp32", "max_new_tokens=6"], words)) == status


def test_decoder_generates_same_text_from_all_inputs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("gpt", model="gpt_tiny")
    run = "checkpoint=runs/gpt"
    prompts = ["The lovely cat", "A king, a queen"]
    Path("prompts.txt").write_text("\n".join(prompts) + "\n")
    Path("prompts.jsonl").write_text("".join(json.dumps({"said": text}) + "\n" for text in prompts))
    capsys.readouterr()
    shown = []
    for text in prompts:  # streamed one by one
        generate(run, f"prompt={text}", "temperature=1.0")
        shown.append(capsys.readouterr().out)
        assert shown[-1].startswith(text)
    generate(run, "input=prompts.txt", "temperature=1.0")
    assert capsys.readouterr().out == "".join(shown)
    generate(run, "input=prompts.jsonl", "column=said", "temperature=1.0", "output=out.jsonl", "seed=0")
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [visible(row["text"]) + "\n" for row in rows] == shown and [row["prompt"] for row in rows] == prompts
    assert "2 texts written to out.jsonl" in capsys.readouterr().out
    generate(run, f"prompt={prompts[0]}", "temperature=1.0", "seed=1")
    assert capsys.readouterr().out != shown[0]
    loaded = lmtool.load("runs/gpt")
    answers = loaded.generate(prompts, temperature=1.0, max_new_tokens=6)
    assert [visible(prompt + answer) + "\n" for prompt, answer in zip(prompts, answers, strict=True)] == shown

    generate(run, "input=prompts.jsonl", status=2)
    assert "no column text; its first line names said" in capsys.readouterr().err
    Path("holes.jsonl").write_text('{"text": "A cat"}\n{"text": null}\n')
    generate(run, "input=holes.jsonl", status=2)
    assert "holes.jsonl:2: the column text has no text" in capsys.readouterr().err
    Path("long.txt").write_text("A cat.\n" + "The cat saw. " * 400)
    generate(run, "input=long.txt", status=2)
    error = capsys.readouterr().err
    assert "error: long.txt:2: the prompt has" in error and "more than the maximum of" in error
    generate(run, status=2)
    assert "neither prompt nor input is set" in capsys.readouterr().err
    generate(run, "prompt=a", "top_k=3", status=2)
    assert "set temperature=1.0 too" in capsys.readouterr().err


def test_t5_fills_sentinels_and_encoder_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("t5", model="t5_tiny")
    capsys.readouterr()
    generate("checkpoint=runs/t5", "prompt=The <extra_id_0> cat saw <extra_id_1> dog.")
    out = capsys.readouterr().out
    assert out.startswith("The [") and "] cat saw [" in out and out.endswith("] dog.\n")
    pretrain("bert")
    capsys.readouterr()
    generate("checkpoint=runs/bert", "prompt=a", status=2)
    error = capsys.readouterr().err
    assert "cannot generate text" in error and "lmtool predict" in error


def test_generate_reads_table_like_its_task(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pairs").mkdir()
    lines = [f"The cat saw {number} dogs.\tDie Katze sah {number} Hunde." for number in range(12)]
    for split in ("train", "dev"):
        Path(f"pairs/{split}.tsv").write_text("\n".join(lines) + "\n")  # without a header
    words = ["finetune", "task=tatoeba", "task.path=pairs", "model=gpt_tiny", "checkpoint=none", "device=cpu"]
    words += ["precision=fp32", "max_steps=1", "max_epochs=null", "batch_examples=4", "tokenizer.vocab_size=300"]
    words += ["task.generation.max_new_tokens=2", "name=pairs"]
    assert cli.main([*words, "max_length=40"]) == 2
    error = capsys.readouterr().err
    assert "max_length=40 and task.target_tokens=48: model=gpt reads the source before the target" in error
    assert "set max_length=96 or task.target_tokens=20" in error and not Path("runs/pairs").exists()
    assert cli.main([*words, "max_length=40", "task.target_tokens=20"]) == 0
    generate("checkpoint=runs/pairs", "input=pairs/dev.tsv", "output=said.jsonl")
    rows = [json.loads(line) for line in Path("said.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [line.partition("\t")[0] for line in lines]


def test_generation_config_of_checkpoint_is_used(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("bart", place / "published")
    file = place / "published/generation_config.json"
    said = json.loads(file.read_text())
    assert said["forced_eos_token_id"] == 2  # as transformers saves BART
    file.write_text(json.dumps({**said, "repetition_penalty": 1.7, "num_beams": 3}))
    assert cli.main(["import", "checkpoint=published", "output=ours"]) == 0
    prompts = ["The quick dog", "She sells sea shells"]
    Path("prompts.txt").write_text("\n".join(prompts) + "\n")
    texts = {}
    for folder in ("published", "ours"):
        loaded = lmtool.load(folder)
        texts[folder] = loaded.generate(prompts, max_new_tokens=6)
        assert texts[folder] == loaded.generate(prompts, max_new_tokens=6, forced_eos=True, repetition_penalty=1.7)
        assert texts[folder] != loaded.generate(prompts, max_new_tokens=6, forced_eos=False, repetition_penalty=1.7)
        assert texts[folder] != loaded.generate(prompts, max_new_tokens=6, forced_eos=True, repetition_penalty=1.0)
        capsys.readouterr()
        generate(f"checkpoint={folder}", "input=prompts.txt", "output=out.jsonl")
        rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
        assert [row["text"] for row in rows] == texts[folder]
        assert "settings of the checkpoint that are not used: beams=3\n" in capsys.readouterr().out
    assert texts["published"] == texts["ours"]
    file.write_text(json.dumps({**said, "repetition_penalty": "much"}))
    generate("checkpoint=published", "prompt=The", status=2)
    assert "generation_config.json has repetition_penalty=much" in capsys.readouterr().err
    generate("checkpoint=published", "prompt=The", "repetition_penalty=1.0")


def test_stopped_generation_continues_after_its_finished_batches(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain("gpt", model="gpt_tiny")
    Path("prompts.txt").write_text("".join("The cat saw" + " the dog" * number + "\n" for number in range(6)))
    words = ["checkpoint=runs/gpt", "input=prompts.txt", "temperature=1.0", "batch_tokens=40"]
    generate(*words, "output=whole.jsonl")
    batches, run_batch = [], Sampling.run

    def stop_at_third(strategy: Sampling, decoding: Decoding, request: Request) -> list[list[int]]:
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(run_batch(strategy, decoding, request))
        return batches[-1]

    monkeypatch.setattr(Sampling, "run", stop_at_third)
    generate(*words, "output=out.jsonl", status=130)
    (unfinished,) = Path().glob("out.jsonl.*.unfinished")
    lines = unfinished.read_bytes().splitlines(keepends=True)
    unfinished.write_bytes(b"".join(lines) + lines[-1][:-2])  # a kill may leave an incomplete line
    count = sum(map(len, batches))
    assert not Path("out.jsonl").exists() and len(lines) == count < 6
    batches.clear()
    monkeypatch.setattr(Sampling, "run", run_batch)
    generate(*words, "output=out.jsonl", "seed=5")  # another request does not continue it
    assert "continues after" not in capsys.readouterr().out and unfinished.exists()
    generate(*words, "output=out.jsonl")
    assert f"continues after {count} of 6 texts" in capsys.readouterr().out
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes() and not unfinished.exists()


def test_full_disk_and_damaged_part_are_one_line_each(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain("gpt", model="gpt_tiny")
    Path("prompts.txt").write_text("The cat\nA king\n")
    words = ["checkpoint=runs/gpt", "input=prompts.txt", "output=out.jsonl"]
    write_output = generate_command.write_output
    monkeypatch.setattr(generate_command, "write_output", lambda *_: pytest.fail("stopped before the output"))
    with pytest.raises(pytest.fail.Exception):
        generate(*words)
    monkeypatch.setattr(generate_command, "write_output", write_output)
    (unfinished,) = Path().glob("out.jsonl.*.unfinished")
    with unfinished.open("ab") as file:
        file.write(b"[1]\n")
    generate(*words, status=2)
    assert f"{unfinished.resolve()} is damaged" in capsys.readouterr().err
    unfinished.unlink()

    class FullDisk(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UnfinishedOutput, "_open", lambda *_: FullDisk())
    generate(*words, status=2)
    assert "output=out.jsonl cannot be written: No space left on device" in capsys.readouterr().err
