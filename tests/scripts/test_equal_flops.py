"""The table of equal FLOPs: its words are those of lmtool, finished runs stay, and what stands in it are means."""

from __future__ import annotations

import json
import sys

from lmtool.cli import main as cli


def test_rows_of_all_families_make_a_table_that_resumes(script, monkeypatch, tmp_path, capsys):
    module = script("equal_flops")
    started = []

    def execute(words, threads, log):
        """Decode a run, and end it at once: its accuracy is its seed in tenths."""
        started.append(words)
        given = dict(word.split("=", 1) for word in words[1:])
        if words[0] == "tokenizer":
            return
        result = {"parameters": 5, "steps": 2, "tokens": 3_000_000, "seconds": 1.0, "ended": "max_flops"}
        result |= {"metric": "accuracy", "value": int(given["seed"]) / 10, "baseline": 0.125}
        if words[0] == "pretrain":
            result |= {"metrics": {"mlm_loss": 5.0 + int(given["seed"]), "mlm_baseline": 6.0, "mlm_accuracy": 0.1}}
        if given["seed"] == "1" and given.get("checkpoint", "none") == "none":
            kept = [word for word in words[1:] if not word.startswith("tokenizer")]
            config = cli.configuration(words[0], cli.parse([*kept, "tokenizer=wordpiece"]), running=False)
            sizes = {**module.SHAPE, **module.FAMILIES[config.model.name]}
            assert sizes.items() <= config.model.model_dump().items()
            assert words[0] == "finetune" or (config.max_flops, config.max_steps, config.optimizer.lr) == (
                7e12, None, 0.002
            )  # fmt: skip
        (log.with_suffix("") / "checkpoints").mkdir(parents=True)
        (log.with_suffix("") / "result.json").write_text(json.dumps(result))

    monkeypatch.setattr(module, "execute", execute)
    monkeypatch.setattr(module, "masked_words", lambda folder, threads: {"loss": 5.5, "constant": 6.1})
    words = ["equal_flops.py", "--seeds", "1,3", "--jobs", "1", "--output", str(tmp_path)]
    families = [family for family in module.FAMILIES if module.experiment(family).is_file()]
    assert {"bert", "roberta", "electra", "deberta_v3", "modernbert"} <= set(families)
    for runs in (1 + 6 * len(families), 1):  # no file of the vocabulary is written here
        monkeypatch.setattr(sys, "argv", words)
        module.main()
        assert len(started) == runs
        started.clear()
    few = tmp_path / "few"
    monkeypatch.setattr(sys, "argv", [*words[:-1], str(few), "--pretrainings", "1", "--families", "bert"])
    module.main()
    assert sum(word == f"checkpoint={few / 'bert-1'}" for given in started for word in given) == 2
    assert len(started) == 6
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*words, "--markdown", str(tmp_path / "rows.jsonl")])
    module.main()
    _, _, *lines, _, note = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == [f"| {family}" for family in families]
    assert {line.split(" | ", 1)[1] for line in lines} == {
        "5 | 3.00 | 5.500 ± 0.000 | mlm 7.000 ± 1.000 (6.000) | 0.200 ± 0.100 | 0.200 ± 0.100 |"
    }
    assert note == "majority 0.125; best constant of masked words 6.100; seeds of pretraining 1, 3; of finetuning 1, 3"
