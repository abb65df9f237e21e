"""Synthetic texts against real ones: what a classifier learns from them, statistics, and copies."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import transformers

from dpoptim.app import evaluate_synthetic
from dpoptim.app.cli import main
from dpoptim.app.synthetic.copies import WORDS, find_copies, words_of
from tests.app import tiny

COMMON = ["film", "story", "actors", "music", "camera", "plot", "scene", "ending"]
OWN = {"good": ["great", "lovely", "bright"], "bad": ["dull", "awful", "grim"]}


def write(path, count, seed, flip=False):
    """Reviews with one word of their label among common words; `flip` gives each the wrong label."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        label, other = ("good", "bad") if number % 2 else ("bad", "good")
        words = [*generator.choices(COMMON, k=generator.randint(4, 9)), generator.choice(OWN[label])]
        generator.shuffle(words)
        rows.append({"text": " ".join(words), "label": other if flip else label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path):
    return {
        name: write(tmp_path / f"{name}.jsonl", 80, seed) for seed, name in enumerate(("synthetic", "train", "test"))
    }


def flags(files):
    return [part for name, path in files.items() for part in (f"--{name}", path)]


def test_a_classifier_learns_from_synthetic_texts(files, tmp_path, capsys):
    assert main(["evaluate-synthetic", *flags(files)]) == 0
    shown = capsys.readouterr().out
    own, real = re.findall(
        r"training on 80 (?:synthetic|real) texts: ([\d.]+) % \(95 % interval: [\d.]+ to 1?\d\d", shown
    )
    assert float(own) > 95 < float(real)
    assert "The most common label alone gives 50.0 %" in shown
    assert "Not private" in shown
    wrong = evaluate_synthetic(write(tmp_path / "wrong.jsonl", 80, 5, flip=True), files["train"], files["test"])
    assert wrong.accuracy is not None
    assert wrong.accuracy["synthetic"] < 0.1 < 0.9 < wrong.accuracy["training"]


def test_classifiers_learn_from_the_same_number_of_texts(files, tmp_path, monkeypatch):
    seen = []

    def record(model, train, test, **named):
        seen.append(list(train.texts))
        return 0.5

    monkeypatch.setattr("dpoptim.app.synthetic.evaluate.accuracy", record)
    for count in (20, 400):
        found = evaluate_synthetic(write(tmp_path / "made.jsonl", count, 7), files["train"], files["test"])
        assert found.learned_from == len(seen[-1]) == len(seen[-2]) == min(count, 80)
    for seed in (0, 1):
        evaluate_synthetic(tmp_path / "made.jsonl", files["train"], files["test"], seed=seed)
    assert seen[2] == seen[4] != seen[6], "a random part by the seed"


def test_one_label_is_learned_as_the_only_answer(files, tmp_path):
    made = tmp_path / "made.jsonl"
    made.write_text(json.dumps({"text": "great story", "label": "good"}) + "\n")
    found = evaluate_synthetic(made, files["train"], files["test"])
    assert found.accuracy is not None
    assert found.accuracy["synthetic"] == 0.5


def test_json_says_that_it_is_not_private(files, capsys):
    assert main(["evaluate-synthetic", *flags(files), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["not_private"] is True
    assert found["texts"]["synthetic"]["texts"] == found["copies"]["test"]["texts"] == 80
    assert found["texts"]["training"]["distinct_words"] == 14
    assert found["texts"]["synthetic"]["covered"] == 1.0


def test_copies_are_found_and_counted(files, tmp_path):
    lines = [json.loads(line) for line in Path(files["train"]).read_text().splitlines()]
    lines[3]["text"] = "one two three four five six seven eight nine ten"
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        "fresh words that no record has at all",
        f"{lines[5]['text'].upper()}!",  # the same words
        "zero one two three four five six seven eight nine zero",  # nine of ten in a row
        "one two three four",  # too short to count
        "one two three and then four five six seven eight later on",  # five in a row
    ]
    made = tmp_path / "made.jsonl"
    made.write_text("".join(json.dumps({"text": row, "label": "good"}) + "\n" for row in rows))
    found = evaluate_synthetic(made, tmp_path / "train.jsonl", files["test"])
    assert found.copies["synthetic"] == {"texts": 5, "exact": 1, "near": 2, "longest": 9}
    assert found.worst[0] == {"row": 3, "training_record": 4, "words": 9}


def longest_in_common(one, other):
    """Brute force: the longest run of words that two texts share."""
    first, second = words_of(one), words_of(other)
    best = 0
    for i in range(len(first)):
        for j in range(len(second)):
            size = 0
            while i + size < len(first) and j + size < len(second) and first[i + size] == second[j + size]:
                size += 1
            best = max(best, size)
    return best if best >= WORDS else 0


def copies(texts, known):
    return find_copies([words_of(text) for text in texts], [words_of(text) for text in known])


def test_passages_with_a_gap_are_not_joined():
    found = copies(["a b c d e Y f g h i j"], ["a b c d e X f g h i j"])
    assert found.longest.tolist() == [5]
    assert found.share.tolist() == pytest.approx([2 / 7])


def test_common_phrases_hide_no_copy():
    """The 150th of many texts with the same beginning, copied to a half."""
    known = [f"dear sir or madam i write to you because {' '.join(f'w{i}x{j}' for j in range(9))}" for i in range(300)]
    found = copies([" ".join([*known[149].split()[:14], "n", "m", "o", "p"])], known)
    assert found.longest.tolist() == [14]
    assert found.record.tolist() == [149]
    assert found.share.tolist() == pytest.approx([10 / 14])


@pytest.mark.parametrize("alphabet", ["a", "abc", "abcdefgh"])
def test_copies_match_brute_force(alphabet):
    generator = random.Random(0)
    texts = [" ".join(generator.choices(alphabet, k=generator.randint(0, 25))) for _ in range(120)]
    own, known = texts[:60], texts[60:]
    found = copies(own, known)
    for place, text in enumerate(own):
        longest = [longest_in_common(text, one) for one in known]
        assert found.longest[place] == max(longest)
        assert found.is_exact[place] == (text in known)
        if found.is_exact[place]:
            assert known[found.record[place]] == text
        elif max(longest):
            assert longest[found.record[place]] == max(longest)
        runs = [tuple(words_of(text)[i : i + WORDS]) for i in range(len(words_of(text)) - WORDS + 1)]
        theirs = [{tuple(words_of(one)[i : i + WORDS]) for i in range(len(words_of(one)) - WORDS + 1)} for one in known]
        share = max(sum(run in own for run in runs) for own in theirs) / len(runs) if runs else float(text in known)
        assert found.share[place] == pytest.approx(share)


def test_chats_without_labels_are_compared_by_their_responses(tmp_path):
    chat = [{"role": "user", "content": "the same question for everyone here"}, {"role": "assistant", "content": "a b"}]
    for name in ("synthetic", "train", "test"):
        chat[1]["content"] = f"answer {name}"
        (tmp_path / name).with_suffix(".jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    found = evaluate_synthetic(*(tmp_path / f"{name}.jsonl" for name in ("synthetic", "train", "test")))
    assert found.accuracy is None
    assert found.copies["synthetic"]["near"] == 0, "questions are not compared"
    assert found.texts["synthetic"]["words_median"] == 2


@pytest.mark.slow
def test_a_model_of_transformers_is_fine_tuned(files, tmp_path):
    words = tiny.wordpiece()
    model = tiny.saved(tmp_path / "bert", transformers.BertForMaskedLM(tiny.bert_config(len(words))), words)
    found = evaluate_synthetic(*(files[name] for name in ("synthetic", "train", "test")), model=model)
    assert found.accuracy is not None
    assert found.accuracy.keys() == {"synthetic", "training", "most common label"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["--test", "missing.jsonl"], "data 'missing.jsonl' does not exist"),
        (["--text-column", "x"], "text_column='x' is not a column"),
        (["--label-column", "x"], "label_column='x' is not a column"),
        (["--model", "missing/model/x"], "tokenizer='missing/model/x' does not exist"),
        (["--text-column", "x"], "dpoptim: training texts: "),
    ],
)
def test_mistakes_are_one_line(files, changes, problem, refusal):
    assert problem in refusal("evaluate-synthetic", *flags(files), *changes)


def test_labels_must_be_those_of_the_training_texts(files, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "a", "label": "unknown"}) + "\n")
    assert main(["evaluate-synthetic", *flags({**files, "synthetic": str(other)}), "--label-column", "label"]) == 2
    assert "labels that are not in label_names" in capsys.readouterr().err


def test_a_file_is_not_compared_with_itself(files, capsys):
    assert main(["evaluate-synthetic", *flags({**files, "test": files["train"]})]) == 2
    assert "training and test texts are both" in capsys.readouterr().err
