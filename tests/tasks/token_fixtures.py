"""Tagged sentences in the layouts of the sources of shipped tasks."""

from __future__ import annotations

WORDS = ["fine", "warm", "film", "lovely", "story", "dull", "cold", "mess", "waste", "time"]
NAMES = {
    "wnut17": ["person", "group"], "conll2003": ["PER", "LOC"], "bc5cdr": ["Chemical", "Disease"],
    "conll2000": ["NP", "VP"], "chunking": ["NP", "VP"],
}  # fmt: skip


def tagged(count, kinds=("PER", "LOC")):
    """Sentences with BIO tags: entities of one and two words, and adjacent entities of the same type."""
    sentences = []
    for number in range(count):
        kind, other = kinds[number % 2], kinds[1 - number % 2]
        word = WORDS[number % len(WORDS)]
        tags = [f"B-{kind}", f"I-{kind}", "O", f"B-{other}", f"B-{other}"] if number % 4 else ["O", f"B-{kind}", "O"]
        sentences.append(([f"{word}{place}" if place % 2 else word for place in range(len(tags))], tags))
    return sentences


def conll(path, sentences, divider="\t", before=(), document=False):
    """Write a word and its tag per line, with the columns `before` between them."""
    lines = [divider.join(["-DOCSTART-", *before, "O"]), ""] if document else []
    for words, tags in sentences:
        lines += [divider.join([word, *before, tag]) for word, tag in zip(words, tags, strict=True)] + [""]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def conllu(path, sentences):
    lines = []
    for number, (words, tags) in enumerate(sentences):
        lines += [f"# sent_id = {path.stem}-{number}", f"# text = {' '.join(words)}", "1-2\t_" + "\t_" * 8]
        for place, (word, tag) in enumerate(zip(words, tags, strict=True)):
            upos = {"O": "ADP", "B": "NOUN", "I": "VERB"}[tag[0]]
            lines.append(f"{place + 1}\t{word}\t{word}\t{upos}\tX" + "\t_" * 5)
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


def tagged_folder(name, folder):
    """The data of a shipped task as its source distributes them. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = NAMES.get(name, ["PER", "LOC"])
    for split, count in (("train", 12), ("dev", 6), ("test", 3)):
        sentences = tagged(count, kinds)
        if name == "ud_ewt":
            conllu(folder / f"en_ewt-ud-{split}.conllu", sentences)
        elif name == "pos":
            conllu(folder / f"{split}.conllu", sentences)
        elif name == "wnut17":
            conll(folder / f"{split}.conll", sentences)
            with (folder / f"{split}.conll").open("a") as file:
                file.write("\t\n\nend\tO\n")  # sentences separated by a line with only a tab
        elif name == "bc5cdr":
            conll(folder / f"{'devel' if split == 'dev' else split}.tsv", sentences)
        elif name == "conll2003":
            conll(folder / f"{'valid' if split == 'dev' else split}.txt", sentences, " ", ("NN", "B-NP"), True)
        elif name in ("conll2000", "chunking"):
            if split != "dev":
                conll(folder / f"{split}.txt", sentences, " ", ("NN",))
        else:
            conll(folder / f"{split}.conll", sentences)
    return folder
