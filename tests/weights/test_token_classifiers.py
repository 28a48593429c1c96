"""Published classifiers of words are read with their head, and written as they were."""

from __future__ import annotations

import pytest
import torch
import transformers

import lmtool
from lmtool.config.tables import build
from lmtool.models import bert, roberta
from lmtool.weights.classifiers import labels_of, refusal, task_of
from lmtool.weights.reading import read, their_names
from lmtool.weights.task_heads import head_of_class
from tests.weights.published_folders import FAMILIES, ROWS, TEXTS, sample

CLASSES = {
    "bert": "BertForTokenClassification", "roberta": "RobertaForTokenClassification",
    "gpt": "GPT2ForTokenClassification", "distilbert": "DistilBertForTokenClassification",
    "albert": "AlbertForTokenClassification",
    "electra": "ElectraForTokenClassification",
}  # fmt: skip


@pytest.mark.parametrize("family", CLASSES)
def test_logits_are_transformers(family, tmp_path):
    model, tokenizer = FAMILIES[family]
    torch.manual_seed(3)
    config = model().config
    config.update({"id2label": {0: "O", 1: "B-A", 2: "I-A"}, "label2id": {"O": 0, "B-A": 1, "I-A": 2}})
    published = getattr(transformers, CLASSES[family])(config).eval()
    published.save_pretrained(tmp_path)
    build(tokenizer, TEXTS, ROWS).save(tmp_path)
    loaded = lmtool.load(tmp_path)
    ids, mask, _ = sample(False)
    with torch.no_grad():
        theirs = published(input_ids=ids, attention_mask=mask).logits
        ours = loaded.model(ids, mask).logits
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], atol=1e-5, rtol=1e-4)
    assert ours.shape == (*ids.shape, 3)
    # And back under the same names.
    module = {"bert": bert, "roberta": roberta}.get(family)
    if module is not None:
        back = their_names(loaded.config, read(str(tmp_path)).tensors)
        assert back.keys() == published.state_dict().keys() - {f"{family}.embeddings.position_ids"}


def test_the_task_in_a_config_json():
    config = {"architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "B-A", "2": "I-A"}}
    assert head_of_class(config).name == "token_classifier" and refusal(config) is None
    task = task_of(config)
    assert task["kind"] == "token_classification" and task["scheme"] == "bio" and task["labels"] == ["O", "B-A", "I-A"]
    assert labels_of(task) == {
        "num_labels": 3, "id2label": config["id2label"], "label2id": {"O": 0, "B-A": 1, "I-A": 2}
    }  # fmt: skip
    speech = task_of({**config, "id2label": {"0": "NOUN", "1": "VERB"}})
    assert speech["scheme"] == "none" and speech["metrics"] == ["accuracy"]
    assert "labels: 1" in refusal({**config, "id2label": {"0": "NOUN"}})
