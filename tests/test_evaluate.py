"""Scoring a drafter: the teacher-forced pass against generating by hand, and the script around it."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter import acceptance, answers, results, scoring
from drafter.copy_policy import prompt_lookup
from drafter.provenance import read_json, sha256_file, sha256_folder, write_json
from drafter.recipe import load_recipe
from drafter.teacher_data import ShardWriter, TeacherRow
from scripts import evaluate, pack_model, validate

VOCAB, NUM_IDS, STOP = 40, 37, 2  # rows 37..39 of the table are padding


@dataclass
class Row:
    prompt_ids: list
    continuation_ids: list
    finish_reason: str
    category: str = "chat"
    family: str = "greeting/01"
    split: str = "development"
    id: str = "row"
    source: str = "test"


def tiny_model(seed: int, noise_of=None) -> LlamaForCausalLM:
    """A random two-layer model in fp32; `noise_of` gives a student that agrees with that teacher fairly often."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.25,
        pad_token_id=STOP,
    )
    model = LlamaForCausalLM(config).eval()
    if noise_of is not None:
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), noise_of.parameters(), strict=True):
                ours.copy_(theirs + 0.03 * torch.randn_like(theirs))
    return model


@torch.no_grad()
def greedy_by_hand(model, prompt, count, stop=STOP):
    """One row, no cache, no batch: the slow oracle. Stops behind the stop id."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1, :NUM_IDS]
        tokens.append(int(logits.argmax()))
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def teacher():
    torch.set_num_threads(1)
    return tiny_model(0)


@pytest.fixture(scope="module")
def student(teacher):
    return tiny_model(1, noise_of=teacher)


@pytest.fixture(scope="module")
def rows(teacher):
    """24 prompts of different lengths with the teacher's own answers, some ended and some cut."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(24):
        prompt = rng.integers(3, NUM_IDS, size=int(rng.integers(2, 20))).tolist()
        answer = greedy_by_hand(teacher, prompt, int(rng.integers(6, 40)))
        reason = "stop" if answer[-1] == STOP else "length"
        if index % 3 == 0 and reason == "length":  # an ended text: the stop id stands where the teacher was cut
            answer, reason = [*answer, STOP], "stop"
        family = ("greeting/01", "greeting/02", "letters/01")[index % 3]
        made.append(Row(prompt, answer, reason, ("chat", "math")[index % 2], family, id=f"row{index}"))
    return made


# ---------------------------------------------------------------------------- the forward pass


def test_bits_equal_one_position_at_a_time(student, rows):
    """The batched, padded, chunked pass against a forward per position of each row on its own."""
    scores = scoring.score_model(student, rows, num_ids=NUM_IDS, batch_tokens=100, head_rows=7, with_gaps=True)
    for row, score in zip(rows, scores, strict=True):
        bits, gaps = [], []
        for at, target in enumerate(row.continuation_ids):
            with torch.no_grad():
                ids = torch.tensor([[*row.prompt_ids, *row.continuation_ids[:at]]])
                logits = student(input_ids=ids, use_cache=False).logits[0, -1, :NUM_IDS]
            bits.append(int(logits.argmax()) == target)
            two = logits.topk(2).values
            gaps.append(float(two[0] - two[1]))
        assert score.runs.tolist() == acceptance.run_lengths(bits).tolist()
        np.testing.assert_allclose(score.gaps, gaps, atol=1e-4)


def test_the_teacher_agrees_with_itself(teacher, rows):
    """Its own student: every bit is right (but for stop ids that the test put there), tau near k + 1."""
    own = [row for row in rows if row.finish_reason == "length"]
    result = scoring.evaluate_model(teacher, own, num_ids=NUM_IDS, ks=(2, 4))
    assert result.agreement == 1.0
    assert result.tau == {2: 3.0, 4: 5.0}


def test_padding_rows_of_the_table_never_win(teacher, rows):
    """A table may have more rows than ids exist (Qwen3: 151,936 against 151,669). One whose logit is always the
    largest must not change a bit."""
    rigged = tiny_model(0)
    with torch.no_grad():
        rigged.lm_head = torch.nn.Linear(32, VOCAB, bias=False)  # untied: the inputs stay as they are
        rigged.lm_head.weight.copy_(teacher.lm_head.weight)
        rigged.lm_head.weight[NUM_IDS::2] = 1e4  # of two opposite rows one always has the largest logit
        rigged.lm_head.weight[NUM_IDS + 1 :: 2] = -1e4
    ours = scoring.score_model(rigged, rows, num_ids=NUM_IDS)
    plain = scoring.score_model(teacher, rows, num_ids=NUM_IDS)
    assert [s.runs.tolist() for s in ours] == [s.runs.tolist() for s in plain]
    broken = scoring.score_model(rigged, rows, num_ids=VOCAB)  # the test bites
    assert all(s.runs.max() == 0 for s in broken)


def test_ids_equal_to_the_pad_id_are_ordinary_tokens(student, rows):
    """Kind of TOK-5: masks made by comparing ids with the pad id hide genuine stop ids. Here pad = stop = 2, and
    prompts full of it score alike alone and beside a longer row."""
    odd = replace(rows[0], prompt_ids=[STOP, 9, STOP, STOP, 11, STOP])
    [alone] = scoring.score_model(student, [odd], num_ids=NUM_IDS)
    together = scoring.score_model(student, [*rows[:5], odd], num_ids=NUM_IDS)
    assert together[-1].runs.tolist() == alone.runs.tolist()


def test_the_model_keeps_its_mode_and_its_gradients(student, rows):
    student.train()
    scoring.evaluate_model(student, rows[:2], num_ids=NUM_IDS, ks=(2,))
    assert student.training
    student(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()
    student.zero_grad()
    student.eval()


def test_empty_rows_are_named(student, rows):
    with pytest.raises(ValueError, match=r"row 1 \(row1\) has an empty"):
        scoring.score_model(student, [rows[0], replace(rows[1], continuation_ids=[])], num_ids=NUM_IDS)
    with pytest.raises(ValueError, match="'x': no rows"):
        scoring.summarise("x", [], [])


# ---------------------------------------------------------------------------- parity: bits against real drafts


@pytest.mark.parametrize("k", [1, 4, 16])
def test_tau_by_bits_equals_tau_by_replay(student, rows, k):
    """The claim that everything rests on, in fp32 where equality is exact: no near tie is allowed to explain."""
    scores = scoring.score_model(student, rows, num_ids=NUM_IDS, with_gaps=True)
    parity = scoring.replay_parity(
        rows, scores, k, lambda prefixes: [greedy_by_hand(student, prefix, k) for prefix in prefixes]
    )
    assert parity["equal"] == len(rows)
    assert parity["tau_bits"] == parity["tau_replay"]
    assert 1 < parity["tau_bits"] < k + 1  # neither trivial end


def test_parity_finds_another_model(student, teacher, rows):
    """Drafts of a model that was not scored must be called different, not explained away."""
    scores = scoring.score_model(student, rows, num_ids=NUM_IDS, with_gaps=True)
    parity = scoring.replay_parity(
        rows, scores, 4, lambda prefixes: [greedy_by_hand(teacher, prefix, 4) for prefix in prefixes]
    )
    assert parity["different"] > 0
    assert parity["equal"] + parity["near_tie"] + parity["different"] == len(rows)


def test_prompt_lookup_by_runs_equals_replay(rows):
    """Not autoregressive, so its runs are not consecutive bits; one pass with k = 16 must serve every k."""
    repetitive = [replace(row, prompt_ids=[*row.continuation_ids, *row.prompt_ids]) for row in rows]
    scores = scoring.score_prompt_lookup(repetitive, 16)
    for k in (2, 4, 16):
        parity = scoring.replay_parity(
            repetitive, scores, k, lambda prefixes, k=k: [prompt_lookup(prefix, k) for prefix in prefixes]
        )
        assert parity["equal"] == len(rows)
    assert parity["tau_bits"] > 2


# ---------------------------------------------------------------------------- the record


def test_record_of_a_stage(student, rows):
    result = scoring.evaluate_model(
        student, rows, num_ids=NUM_IDS, stage="distill", train_families={"greeting/01", "weather/03"}, seconds=12.34
    )
    record = result.record
    assert (record["stage"], record["layers"], record["seconds"], record["rows"]) == ("distill", 2, 12.3, 24)
    assert set(record["tau"]) == {"4", "8", "16"} and set(record["by_category"]) == {"chat", "math"}
    low, high = record["tau16_interval"]
    assert low <= record["tau"]["16"] <= high
    assert all(1 <= tau <= int(k) + 1 for k, tau in record["tau"].items())
    assert len(record["cumulative16"]) == 16
    groups = {name: [] for name in scoring.NOVELTY}
    for row in rows:
        groups[scoring.novelty(row.family, {"greeting/01"})].append(row)
    assert [len(group) for group in groups.values()] == [8, 8, 8]
    for name, group in groups.items():
        alone = scoring.evaluate_model(student, group, num_ids=NUM_IDS)
        assert record[name] == pytest.approx(alone.tau[16], abs=1e-4)


# ---------------------------------------------------------------------------- prompts files of a user's own


class StubChat:
    """Each character is one id; a turn is closed by id 1. Enough to see what is rendered when."""

    stop_ids, num_ids, thinking = frozenset({STOP}), NUM_IDS, "off"

    @classmethod
    def load(cls, folder, **settings):
        return cls()

    def render(self, messages):
        return [id_ for turn in messages for id_ in [3 + ord(c) % 30 for c in turn["content"]] + [1]]

    def decode(self, ids):
        return "".join(chr(ord("a") + i % 26) for i in ids if i != STOP)


def write_lines(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_three_kinds_of_rows(tmp_path, teacher):
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}], "category": "chat"},
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        "",
        {"prompt": "one\u2028line", "id": 7},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "not the teacher's"}]},
    )
    conversations = answers.read_conversations(path, max_chars=100)
    assert [one.line for one in conversations] == [1, 2, 4, 5]
    made = list(
        answers.answer(
            conversations, teacher, StubChat(), max_new_tokens=8, max_prompt_tokens=100, top_k=3, batch_size=2
        )
    )
    assert [row.id for row in made] == ["1/1", "2/1", "7/1", "5/1", "2/2"]  # the second turn follows all first ones
    assert [row.category for row in made] == ["chat", "writing", "user", "user", "writing"]
    assert {row.family for row in made} == {"mine"}
    for row in made:
        assert row.continuation_ids == greedy_by_hand(teacher, row.prompt_ids, 8)[: len(row.continuation_ids)]
        assert row.topk_ids[:, 0].tolist() == row.continuation_ids
    chat, first = StubChat(), made[1]
    said = chat.decode(first.continuation_ids).strip()
    turns = [("user", "first"), ("assistant", said), ("user", "second")]
    assert made[4].prompt_ids == chat.render([{"role": role, "content": text} for role, text in turns])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2, \(line\): not JSON"),
        ("[1]", r"line 2, \(line\): must be a JSON object, not list"),
        ({"text": "x"}, r"line 2, \(line\): needs exactly one of messages, turns, prompt; has none"),
        ({"prompt": "x", "turns": ["x"]}, "has turns, prompt"),
        ({"prompt": 5}, "line 2, prompt: must be text, not int"),
        ({"prompt": "  "}, "line 2, prompt: blank user"),
        ({"turns": []}, "line 2, turns: must be a non-empty list"),
        ({"turns": ["a", None]}, r"line 2, turns\[1\]: must be text, not NoneType"),
        ({"messages": []}, "line 2, messages: empty conversation"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2, messages: no user turn"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "line 2, messages: content not text"),
        ({"prompt": "x" * 101}, "line 2, prompt: too many chars .limit 100"),
        ({"prompt": "x", "category": 3}, "line 2, category: must be text, not int"),
    ],
)
def test_a_bad_row_names_line_and_field(tmp_path, line, message):
    """Dropping such rows with a counter, as the corpora do, would turn a benchmark into another one."""
    path = write_lines(tmp_path / "mine.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ValueError, match=message):
        answers.read_conversations(path, max_chars=100)


def test_over_long_prompt_and_empty_file(tmp_path, teacher):
    [one] = answers.read_conversations(write_lines(tmp_path / "a.jsonl", {"prompt": "x" * 30}), max_chars=100)
    with pytest.raises(ValueError, match="line 1, user turn 1: 31 prompt tokens; the limit is 20"):
        list(answers.answer([one], teacher, StubChat(), max_new_tokens=4, max_prompt_tokens=20, top_k=2, batch_size=1))
    with pytest.raises(ValueError, match="holds no prompts"):
        answers.read_conversations(write_lines(tmp_path / "b.jsonl"), max_chars=100)


# ---------------------------------------------------------------------------- the scripts


@pytest.fixture
def run_folder(tmp_path, monkeypatch, teacher, student, rows):
    """A recipe's folders below a temporary root: teacher, two checkpoints, shards of development and training rows."""
    declared = load_recipe("tiny")
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    ids = {"stop_ids": (STOP,), "num_ids": NUM_IDS}
    changed = declared.model_copy(
        update={
            "teacher": declared.teacher.model_copy(update=ids),
            "base": declared.base.model_copy(update=ids),
            "generation": declared.generation.model_copy(update={"max_new_tokens": 20}),
            "serving": declared.serving.model_copy(update={"context": 100}),
        }
    )
    for module in (evaluate, validate):
        monkeypatch.setattr(module, "load_recipe", lambda name: changed)
    monkeypatch.setattr(answers, "Chat", StubChat)
    teacher.save_pretrained(changed.cache_dir / "models" / "teacher")
    student.save_pretrained(changed.run_dir / "distill")
    tiny_model(5).save_pretrained(changed.run_dir / "student")
    writer = ShardWriter(changed.cache_dir / "teacher", "development", 2, {})
    for row in rows:
        writer.add(teacher_row(row))
    writer.flush()
    writer = ShardWriter(changed.cache_dir / "teacher", "distill.data", 2, {})
    writer.add(replace(teacher_row(rows[0]), split="train"))
    writer.flush()
    return changed


def teacher_row(row):
    count = len(row.continuation_ids)
    logprobs = np.tile(np.array([[-0.5, -1.0]], dtype=np.float16), (count, 1))
    logprobs[0, 1] = -0.5  # one exact tie a row
    return TeacherRow(
        **{name: getattr(row, name) for name in ("id", "source", "category", "family", "split")},
        prompt_ids=row.prompt_ids,
        continuation_ids=row.continuation_ids,
        finish_reason=row.finish_reason,
        topk_ids=np.stack([row.continuation_ids, row.continuation_ids], axis=1),
        topk_logprobs=logprobs,
        tail_logprob=np.zeros(count, dtype=np.float32),
    )


class StubLoaded:
    """What model_io.load_model returns, around a model that was never packed."""

    tensors, adapter, self_check = {}, None, {"margin": 1.0, "drafts": []}
    copy_policy, draft_vocabulary = {"enabled": False}, None
    archive_id, context, stop_ids, num_ids = "a" * 64, 100, frozenset({STOP}), NUM_IDS
    chat, info = StubChat(), {"recipe": "tiny"}

    def __init__(self, model):
        self.model = model


def last_json(capsys):
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured.out


def test_evaluate_script(run_folder, student, rows, monkeypatch, capsys, tmp_path):
    packed = tmp_path / "archive"
    packed.mkdir()
    (packed / "manifest.json").write_text("{}")
    monkeypatch.setattr(evaluate, "load_model", lambda path, form, dtype: StubLoaded(student))
    targets = ["prompt_lookup", "untrained", str(run_folder.run_dir / "distill"), f"packed={packed}"]
    assert evaluate.main(["--recipe", "tiny", "--replay", "6", "--dtype", "fp32", *targets]) == 0
    document, output = last_json(capsys)
    results.validate(document)
    records = {record["stage"]: record for record in document["rows"]}
    assert list(records) == ["prompt_lookup", "untrained", "distill", "packed"]
    direct = scoring.evaluate_model(student, rows, num_ids=NUM_IDS)
    for stage in ("distill", "packed"):
        assert records[stage]["tau"] == direct.record["tau"]
        assert records[stage]["replay"]["rows"] == records[stage]["replay"]["equal"] == 6
        assert records[stage]["replay"]["tau_bits"] == records[stage]["replay"]["tau_replay"]
    assert records["packed"]["gain"] == {"over": "distill", "tau": 0.0, "interval": [0.0, 0.0]}
    assert records["distill"]["gain"]["tau"] > 0 and records["prompt_lookup"]["replay"] is None
    # training rows hold the skeleton of rows[0], so a third of the rows is seen; a tie of the teacher in each row
    assert records["distill"]["seen"] is not None and records["distill"]["new_families"] is not None
    tokens = sum(len(row.continuation_ids) for row in rows)
    assert records["distill"]["near_tie_share"] == pytest.approx(len(rows) / tokens, abs=1e-4)
    assert (records["untrained"]["seconds"], records["distill"]["seconds"]) == (0.0, None)
    assert "τ@16 by category" in output
    assert results.read(run_folder.run_dir / "evaluation.json") == document
    assert document["name"] == "evaluation" and "scripts.evaluate --recipe tiny --replay 6" in document["command"]
    output = tmp_path / "lookup.json"
    assert evaluate.main(["--recipe", "tiny", "--output", str(output), "prompt_lookup"]) == 0
    assert results.read(output)["command"].endswith("--output lookup.json prompt_lookup")


def test_evaluate_a_users_file(run_folder, monkeypatch, capsys, tmp_path):
    path = write_lines(tmp_path / "bench.jsonl", {"turns": ["abc", "def"]}, {"prompt": "ghi", "category": "math"})
    target = str(run_folder.run_dir / "distill")
    assert evaluate.main(["--recipe", "tiny", "--prompts", str(path), target]) == 0
    [first] = last_json(capsys)[0]["rows"]
    assert first["rows"] == 3 and set(first["by_category"]) == {"math", "user"}
    monkeypatch.setattr(answers, "load_causal_lm", None)  # answers are kept: the teacher is not opened again
    assert evaluate.main(["--recipe", "tiny", "--prompts", str(path), target]) == 0
    [again] = last_json(capsys)[0]["rows"]
    assert again["tau"] == first["tau"]
    final = run_folder.cache_dir / "prompts" / "final.jsonl"
    final.parent.mkdir()
    final.write_bytes(path.read_bytes())
    assert evaluate.main(["--recipe", "tiny", "--prompts", str(path), target]) == 1
    assert "only scripts.validate opens them" in capsys.readouterr().err


def test_evaluate_errors_name_the_fix(run_folder, capsys, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter.safetensors").write_bytes(b"")
    cases = {
        str(adapter): "pack it with its base (python -m scripts.pack_model --recipe tiny)",
        str(tmp_path / "nothing"): "neither a checkpoint nor a packed model",
    }
    for target, message in cases.items():
        assert evaluate.main(["--recipe", "tiny", target]) == 1
        assert message in capsys.readouterr().err
    distill = str(run_folder.run_dir / "distill")
    assert evaluate.main(["--recipe", "tiny", "--split", "selection", distill]) == 1
    assert "python -m scripts.generate_teacher --recipe tiny" in capsys.readouterr().err
    assert evaluate.main(["--recipe", "tiny", distill, distill]) == 1
    assert "NAME=PATH" in capsys.readouterr().err
    assert evaluate.main(["--recipe", "tiny", "--max-rows", "6", "--dry-run", distill]) == 0
    plan = last_json(capsys)[0]
    assert plan["rows"] == 6 and plan["missing"] == []
    assert evaluate.main(["--recipe", "tiny", "--record", "My Table", "--dry-run", distill]) == 1
    assert "lower-case letters" in capsys.readouterr().err  # an hour of scoring once ended in this error


def test_dry_run_says_what_is_missing(run_folder, student, capsys, tmp_path):
    """On a fresh clone --dry-run ended in the error of the first folder that it did not find."""
    distill, nothing = str(run_folder.run_dir / "distill"), str(tmp_path / "nothing")
    assert evaluate.main(["--recipe", "tiny", "--dry-run", "prompt_lookup", distill]) == 0
    plan = last_json(capsys)[0]
    assert plan["targets"][1]["weights"] == sum(p.numel() for p in student.parameters() if p.dim() > 1)
    assert plan["memory_bytes"] > evaluate.MEMORY_BYTES and plan["estimated_s"] == 0
    assert evaluate.main(["--recipe", "tiny", "--split", "selection", "--dry-run", distill, nothing]) == 0
    plan = last_json(capsys)[0]
    assert plan["rows"] == run_folder.splits.selection and plan["memory_bytes"] is plan["estimated_s"] is None
    assert len(plan["missing"]) == 2 and "generate_teacher" in plan["missing"][0] and "nothing" in plan["missing"][1]
    own = write_lines(tmp_path / "mine.jsonl", {"turns": ["abc", "def"]}, {"prompt": "ghi"})
    assert evaluate.main(["--recipe", "tiny", "--prompts", str(own), "--dry-run", distill]) == 0
    plan = last_json(capsys)[0]
    assert (plan["rows"], plan["tokens"], plan["teacher_tokens_at_most"]) == (3, 3 + 3 * 20, 60)
    assert evaluate.main(["--recipe", "tiny", "--prompts", nothing, "--dry-run", distill]) == 0
    assert last_json(capsys)[0]["missing"] == ["no file nothing"]


def test_validate_opens_the_final_file_once(run_folder, student, monkeypatch, capsys, tmp_path):
    """Evidence before numbers: the file says "opened" before the first prompt is read, holds the result before it is
    printed, and ends a second run. A run that died between may be finished, with the same file only."""
    folder = tmp_path / "model"
    folder.mkdir()
    generation = {"format": 1, **pack_model.generation_settings(run_folder)}
    archive = SimpleNamespace(archive_id="a" * 64, generation=generation, info={"recipe": "tiny"})
    monkeypatch.setattr(validate, "load_model", lambda path: archive)
    teacher_dir = run_folder.cache_dir / "models" / "teacher"
    source = {"source": run_folder.teacher.source.model_dump(mode="json"), "files": sha256_folder(teacher_dir, ["*"])}
    monkeypatch.setattr(evaluate, "load_model", lambda path, form, dtype: StubLoaded(student))
    final = write_lines(tmp_path / "final.jsonl", {"prompt": "abc"}, {"prompt": "wxyz"})
    other = write_lines(tmp_path / "other.jsonl", {"prompt": "other"})
    evidence = folder / "evidence" / "validation.json"
    command = ["--recipe", "tiny", "--model", str(folder), "--final"]
    real = validate.answered_file

    def dies(path, recipe):
        opened = read_json(evidence)
        assert (opened["archive_id"], opened["final_sha256"]) == ("a" * 64, sha256_file(final))
        assert opened["result"] is None and "scripts.validate" in opened["command"]
        raise OSError("power cut")

    # what can fail without the prompts fails while the archive has its one chance
    for changed in ({"info": {"recipe": "smollm2-quick"}}, {"generation": {**generation, "context": 64}}):
        with monkeypatch.context() as patch:
            patch.setattr(validate, "load_model", lambda path, c=changed: SimpleNamespace(**{**vars(archive), **c}))
            for argv in ([*command, str(final)], [*command, str(final), "--dry-run"]):
                assert validate.main(argv) == 1
                assert "was not made with recipe tiny" in capsys.readouterr().err and not evidence.exists()
    assert validate.main([*command, str(final)]) == 1
    assert "python -m scripts.download_models --recipe tiny" in capsys.readouterr().err and not evidence.exists()
    write_json(teacher_dir / "source.json", source)
    assert validate.main([*command, str(final), "--dry-run"]) == 0 and not evidence.exists()
    capsys.readouterr()
    monkeypatch.setattr(validate, "answered_file", dies)
    assert validate.main([*command, str(final)]) == 1
    assert "power cut" in capsys.readouterr().err
    monkeypatch.setattr(validate, "answered_file", real)
    assert validate.main([*command, str(other)]) == 1
    assert "already shown another final file" in capsys.readouterr().err
    monkeypatch.setattr(validate, "print_tables", lambda records: print(read_json(evidence)["result"]["stage"]))
    assert validate.main([*command, str(final)]) == 0
    record, output = last_json(capsys)
    assert record == read_json(evidence) and output.startswith("packed\n")
    assert record["result"]["rows"] == 2 and record["result"]["tau"]["16"] is not None
    assert validate.main([*command, str(final)]) == 1
    assert "validation.json" in capsys.readouterr().err
    archive.archive_id = "b" * 64  # packed anew: its own chance, the old evidence stays
    assert validate.main([*command, str(final)]) == 0
    assert read_json(evidence)["archive_id"] == "b" * 64
    assert read_json(evidence.with_name(f"validation-{'a' * 16}.json")) == record


def test_a_replay_that_differs_in_fp32_fails(run_folder, monkeypatch, capsys):
    """Served drafts unlike the scored model's were once explained by rounding. In fp32 nothing may explain them."""
    wrong = [SimpleNamespace(tokens=[3])]
    monkeypatch.setattr(evaluate, "greedy_decode", lambda model, prefixes, k, **settings: wrong * len(prefixes))
    distill = str(run_folder.run_dir / "distill")
    assert evaluate.main(["--recipe", "tiny", "--replay", "6", "--dtype", "fp32", distill]) == 1
    captured = capsys.readouterr()
    assert "real drafts differ" in captured.err
    assert (
        json.loads(captured.out.splitlines()[-1])["rows"][0]["replay"]["different"] > 0
    )  # the numbers are still shown
