"""`lmtool course` runs a document's commands, resumes, and writes one page. Every command of docs/course.md is
composed, and its directives name files that earlier commands write."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from lmtool.cli import main as cli
from lmtool.commands import course as course_command
from lmtool.course import document, page
from lmtool.errors import UserError
from lmtool.system.files import write_manifest

DOCUMENT = """# A course

What it is: see [the page](#second).

## 1. First {#first}

A **bold** claim about `code <b>`.

```bash
mkdir -p runs/a runs/b-1 runs/b-2  # comment
echo 'one
two' && echo ran >> ran.txt
```

<!-- output last 1 -->

```bash together
touch a && timeout 20 bash -c 'until [ -e b ]; do sleep 0.05; done' && echo $OMP_NUM_THREADS
touch b && timeout 20 bash -c 'until [ -e a ]; do sleep 0.05; done' && echo $OMP_NUM_THREADS
```

## 2. Second {#second}

```bash
cat runs/a/result.json
lmtool --version
```

<!-- output first 1 -->
<!-- output until lmtool -->

text with 1 < 2

- **Look at**: this
  line.

<!-- claim a is above b | runs/a value > runs/b-* value -->
<!-- claim a is low | runs/a metrics.loss < 0.5 -->
<!-- claim a layer is good | runs/a/probe.json layers.1.accuracy > 0.2 -->
<!-- claim never run | runs/c value > 1 -->
<!-- show drawn.html 2 -->

## 3. Third {#third}

```bash
lmtool report runs/absent
```
"""
DRAWN = (
    "<main><h1>Drawn</h1><section><h2>Curves</h2><figure><svg><g id='x' id=\"d1-a\"/></svg></figure></section>"
    '<section><h2>Heads</h2><h3>first</h3><figure><svg><g id="d2-a" clip-path="url(#d2-a)"/><use href="#d2-a"/></svg>'
    "</figure><table><tr><td>1</td></tr></table></section></main>"
)


@pytest.fixture
def course(monkeypatch, tmp_path):
    """Runs the command on DOCUMENT in tmp_path; its exit status."""
    (tmp_path / "course.md").write_text(DOCUMENT.replace("echo 'one\ntwo'", "printf 'one\\ntwo\\n'"))
    monkeypatch.setattr(course_command, "document", lambda: tmp_path / "course.md")
    monkeypatch.setattr(course_command, "import_all", lambda: None)  # not needed for --version
    return lambda *topics: cli.main(["course", f"folder={tmp_path / 'out'}", f"topics=[{','.join(topics)}]"])


def result(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(values))


def test_course_runs_resumes_and_writes_page(course, tmp_path, capsys):
    out = tmp_path / "out"
    assert course("fourth") == 2
    assert "topics: fourth is not one of first, second, third" in capsys.readouterr().err
    assert course("third") == 2
    assert "topic third lacks runs/absent" in capsys.readouterr().err
    assert course("first") == 0
    assert (out / "logs/first-2.out").read_text() == "one\ntwo\n"
    assert course("first", "second") == 3  # runs/a has no result yet
    error = capsys.readouterr().err
    assert "topic second ended with status 1 at cat runs/a/result.json" in error and "second-1.err" in error
    assert (out / "ran.txt").read_text() == "ran\n"
    records = json.loads((out / "topics/first.json").read_text())
    assert [record["status"] for record in records] == [0, 0, 0, 0], "the last two wait for each other"
    assert [(out / f"logs/first-{number}.out").read_text() for number in (3, 4)] == ["1\n", "1\n"]
    result(out / "runs/a", value=2.0, metric="loss", standard_error=0.1, metrics={"loss": 0.45, "standard_error": 0.1})
    for seed, value in ((1, 1.0), (2, 1.2)):
        result(out / f"runs/b-{seed}", value=value)
    layers = [{"accuracy": 0.1, "standard_error": 0.1}, {"accuracy": 0.5, "standard_error": 0.12}]
    (out / "runs/a/probe.json").write_text(json.dumps({"layers": layers}))
    (out / "drawn.html").write_text(DRAWN)
    assert course("first", "second") == 0
    page = (out / "index.html").read_text()
    assert '<a href="#second">the page</a>' in page and "<strong>bold</strong>" in page
    assert "<code>code &lt;b&gt;</code>" in page and '<pre class="printed">two</pre>' in page
    assert "2.000 (n = 1) against 1.100 (n = 2), difference +0.9 ± 0.14" in page and "holds here" in page
    assert "0.450 (n = 1) against 0.500, difference -0.05 ± 0.1" in page and "not clear here" in page
    assert "0.500 (n = 1) against 0.200, difference +0.3 ± 0.12" in page
    assert "no result of runs/c" in page and "not run yet" in page
    assert (out / "logs/second-2.out").read_text().startswith("lmtool ") and "text with 1 &lt; 2" in page
    assert (
        page.count('<pre class="printed">{&quot;value&quot;: 2.0') == 2
    )  # the first line, and all lines before lmtool's
    assert page.count("<h3>Heads</h3>") == 1 and "<h3>Curves</h3>" not in page
    assert 'id="e3-d2-a" clip-path="url(#e3-d2-a)"' in page and 'href="#e3-d2-a"' in page
    assert "<td>1</td>" not in page


@pytest.mark.parametrize(
    ("lefts", "rights", "words"),
    [
        ([1.0, 1.1], [0.8, 0.9], "not clear here"),  # 2.8 standard errors, of two degrees of freedom
        ([1.0, 1.02], [0.8, 0.82], "holds here"),
        ([0.8, 0.82, 0.81], [1.0, 1.02, 1.01], "does not hold at this scale"),
        ([1.0, 1.0], [1.0, 1.0], "not clear here"),
        ([1.0, 1.0], [0.8, 0.8], "not clear here"),  # equal values: the spread is unknown
    ],
)
def test_claim_needs_significant_difference(tmp_path, lefts, rights, words):
    for name, values in (("a", lefts), ("b", rights)):
        for seed, value in enumerate(values):
            result(tmp_path / f"{name}-{seed}", value=value)
    claim = document.Claim("", document.Value("a-*", "value"), ">", document.Value("b-*", "value"))
    assert page.judge(claim, tmp_path).words == words


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{#second}", "{#first}", "two topics have the id first"),
        ("## 2. Second", "## Second", "course.md:22: ## Second {#second} is not a heading of a topic"),
        ("output last 1", "print", "<!-- print --> is not a valid directive"),
        ("drawn.html 2", "drawn.html 3-2", "<!-- show drawn.html 3-2 --> is not a valid directive"),
        ("runs/c value > 1", "runs/c value = 1", "is not a valid directive"),
        ("absent\n```", "absent", "this block does not end"),
    ],
)
def test_invalid_course_document_is_refused(old, new, said):
    assert old in DOCUMENT
    with pytest.raises(UserError, match=re.escape(said)):
        document.read_course(DOCUMENT.replace(old, new), "course.md")


def test_shipped_course_composes_and_names_written_files(monkeypatch, tmp_path, capsys):
    """Every command is composed and decoded in the order of the page. Instead of training, a checkpoint with the
    configuration and empty weights is written. Directives name files that an earlier command writes."""
    monkeypatch.chdir(tmp_path)
    text = document.document().read_text(encoding="utf-8")
    course = document.read_course(text)
    assert [topic.number for topic in course.topics] == [*range(1, 21)]
    written: set[str] = set()
    for topic in course.topics:
        for part in topic.parts:
            for line in part.lines if isinstance(part, document.Commands) else ():
                written |= document.written_paths(line)
                if line.startswith("lmtool "):
                    compose_command(line, text, capsys)
            named = [part.page] if isinstance(part, document.Show) else []
            named += [part.left, part.right] if isinstance(part, document.Claim) else []
            for name in [value.folder if isinstance(value, document.Value) else value for value in named]:
                if not isinstance(name, float):
                    folder = name.removesuffix("/evaluation.json")
                    known = any(fnmatch(path, folder) or name.startswith(f"{path}/") for path in written)
                    assert known, (topic.id, name)


def test_compared_models_share_compute_and_positions():
    """Claims compare pretrained models that were finetuned on the same rows, or probed."""
    course = document.read_course(document.document().read_text(encoding="utf-8"))
    trained, compared = {}, []
    for line in (line for topic in course.topics for line in topic.commands if line.startswith("lmtool ")):
        keys = dict(word.split("=", 1) for word in shlex.split(line) if "=" in word)
        if line.startswith("lmtool pretrain"):
            trained[str(keys.get("name"))] = keys.get("max_flops"), keys.get("model/positions")
        elif keys.get("target") == "pydocs":
            compared += re.findall(r"runs/(\w+)", keys["checkpoint"])
    for claim in (part for topic in course.topics for part in topic.parts if isinstance(part, document.Claim)):
        for value in (claim.left, claim.right) if "families" in str(claim.left) else ():
            compared += [name.replace("-", "_") for name in re.findall(r"\*runs-([\w-]+?)_\*", value.folder)]
    assert sorted(compared) == ["bert", "bert", "bert", "electra", "gpt_rotary", "gpt_rotary"]
    assert {trained[name] for name in compared} == {("5e12", "rotary")}


def compose_command(line: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [re.sub(r"^seed=1,.*", "seed=1,2", word) for word in shlex.split(line, comments=True)[1:]]
    if words[0] in ("report", "runs", "list", "show", "resume"):  # these read no configuration
        return
    status = cli.main([*words, "--cfg", "job"])
    printed = capsys.readouterr()
    assert status == 0, f"{line}\n{printed.err}"
    for folder in folders_of(words) if words[0] in ("pretrain", "finetune", "import") else []:
        for number, job in enumerate(yaml.load_all(printed.out, yaml.CSafeLoader)):
            named = re.search(rf"{folder}/({number}_[\w.+-]+)", page)  # a job's folder names the varied keys
            write_placeholder_run(folder / (named[1] if named else str(number)) if "-m" in words else folder, job)


def folders_of(words: list[str]) -> list[Path]:
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    return [Path("runs") / keys["name"]] if "name" in keys else [Path(keys["output"])] if "output" in keys else []


def write_placeholder_run(run: Path, config: dict[str, object]) -> None:
    """Writes a run with a checkpoint that has a configuration and no weights."""
    checkpoint = run / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    for name, content in (("config.json", json.dumps(config)), ("state.json", "{}"), ("model.safetensors", "")):
        (checkpoint / name).write_text(content)
    write_manifest(checkpoint, {"step": 1})
    for pointer in ("best", "last"):
        (run / "checkpoints" / pointer).write_text(checkpoint.name)
