"""The tiny checkpoints: same seed same bytes, readable by anyone, and a head that recites."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sm70_engine.serve.checkpoint import read_checkpoint
from sm70_engine.tinymodel.chains import CHAINS, JSON_ANSWER, JSON_SCHEMA, TOOL_ARGUMENTS, Chain, Kind
from sm70_engine.tinymodel.cli import main
from sm70_engine.tinymodel.draft import MISMATCHED_EXTRA, DraftKind, draft_tensors
from sm70_engine.tinymodel.target import SIZES, build_target, target_config, target_tensors
from sm70_engine.tinymodel.tensors import Tensor
from sm70_engine.tinymodel.tokenizer import END_OF_TURN, START, byte_characters, piece_id, vocabulary


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def values(tensor: Tensor) -> NDArray[np.float32]:
    """The numbers of a bfloat16 tensor."""
    assert tensor.dtype == "BF16"
    bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(tensor.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    out = ["--out", str(path / "model"), "--draft", "dflash", "--draft-out", str(path / "draft")]
    assert main(out) == 0
    return path


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    main(["--out", str(tmp_path / "again"), "--draft", "dflash", "--draft-out", str(tmp_path / "draft")])
    assert digests(tmp_path / "again") == digests(folder / "model")
    assert digests(tmp_path / "draft") == digests(folder / "draft")
    main(["--out", str(tmp_path / "other"), "--seed", "1"])
    assert digests(tmp_path / "other")["model.safetensors"] != digests(folder / "model")["model.safetensors"]


def test_the_bytes_are_those_of_every_machine(folder: Path) -> None:
    # A change here changes every recorded answer and key: it must be meant.
    assert digests(folder / "model")["model.safetensors"][:16] == "a43e32111c026f89"
    assert digests(folder / "draft")["model.safetensors"][:16] == "a7e2ce44f87b9211"


def test_anyone_may_read_the_files(folder: Path) -> None:
    for checkpoint in (folder / "model", folder / "draft"):
        assert checkpoint.stat().st_mode & 0o777 == 0o755
        assert {path.stat().st_mode & 0o777 for path in checkpoint.iterdir()} == {0o644}
        assert not list(checkpoint.glob("*.unfinished"))


def test_a_strict_umask_changes_nothing(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        main(["--out", str(tmp_path / "model")])
    finally:
        os.umask(before)
    assert (tmp_path / "model/config.json").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o755


def test_the_checkpoint_describes_itself(folder: Path) -> None:
    facts = read_checkpoint(folder / "model", "model")
    assert facts.architectures == ("Qwen3_5ForCausalLM",)
    assert facts.quantization == "modelopt NVFP4"
    assert (facts.vocabulary, facts.hidden_size, facts.layers) == (512, 128, 4)
    assert read_checkpoint(folder / "draft", "draft").architectures == ("DFlashDraftModel",)


def test_a_mismatched_draft_has_another_vocabulary(tmp_path: Path) -> None:
    main(["--draft", "dflash", "--draft-out", str(tmp_path / "draft"), "--mismatched"])
    assert read_checkpoint(tmp_path / "draft", "draft").vocabulary == SIZES["tiny"].vocabulary + MISMATCHED_EXTRA


def test_answers_say_what_is_right(folder: Path) -> None:
    answers = {one["kind"]: one for one in json.loads((folder / "model/answers.json").read_text())["answers"]}
    assert set(answers) == {str(kind) for kind in Kind}
    for chain in CHAINS:
        assert answers[chain.kind]["expected"]["completionTokens"] == len(chain.pieces) + 1
        assert answers[chain.kind]["request"]["max_tokens"] > len(chain.pieces) + 1
    assert answers["toolCall"]["expected"]["toolCall"]["arguments"] == TOOL_ARGUMENTS
    schema = answers["json"]["request"]["response_format"]["json_schema"]["schema"]
    # A grammar made from the schema demands the members in its order, which must be the answer's.
    assert schema == JSON_SCHEMA
    assert list(schema["properties"]) == list(JSON_ANSWER)


@cache
def greedy(seed: int, bad: bool = False) -> tuple[int, ...]:
    """The token after every token, from embeddings and head alone, as if the layers added nothing."""
    target = build_target(SIZES["tiny"], seed, bad)
    head = values(target_tensors(target, quantized=False)["lm_head.weight"])
    return tuple(int(token) for token in (target.embeddings @ head.T).argmax(axis=1))


def recite(seed: int, kind: Kind, bad: bool = False) -> list[int]:
    """The tokens up to the end of turn, at most 200."""
    after, ids = greedy(seed, bad), vocabulary()
    walk = [after[ids[START[kind]]]]
    while walk[-1] != ids[END_OF_TURN] and len(walk) < 200:
        walk.append(after[walk[-1]])
    return walk


def expected(chain: Chain) -> list[int]:
    ids = vocabulary()
    return [*(piece_id(ids, piece) for piece in chain.pieces), ids[END_OF_TURN]]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: str(chain.kind))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_head_walks_the_chain(chain: Chain, seed: int) -> None:
    assert recite(seed, chain.kind) == expected(chain)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: str(chain.kind))
def test_a_bad_model_recites_something_else_and_stops(chain: Chain) -> None:
    walk = recite(0, chain.kind, bad=True)
    assert walk != expected(chain)
    assert walk[-1] == vocabulary()[END_OF_TURN]


def test_any_other_token_leads_to_the_text() -> None:
    ids, after = vocabulary(), greedy(0)
    others = [ids[character] for character in byte_characters()] + [ids[END_OF_TURN]]
    assert {after[token] for token in others} == {piece_id(ids, CHAINS[0].pieces[0])}


def test_the_plain_twin_holds_the_values_of_the_quantized_one() -> None:
    target = build_target(SIZES["tiny"], 0)
    plain, quantized = target_tensors(target, quantized=False), target_tensors(target, quantized=True)
    packed = {name.removesuffix("_scale_2") for name in quantized if name.endswith(".weight_scale_2")}
    assert packed == {
        name for name in plain if ".mlp." in name or (name.endswith("_proj.weight") and "self_attn" in name)
    }
    assert all(plain[name] == tensor for name, tensor in quantized.items() if name in plain and name not in packed)
    assert "quantization_config" not in target_config(target, quantized=False)


def test_fused_matrices_share_their_global_scale() -> None:
    tensors = target_tensors(build_target(SIZES["tiny"], 0), quantized=True)
    for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        names = [name for name in tensors if name.endswith(".weight_scale_2") and name.split(".")[-2] in fused]
        by_layer: dict[str, set[bytes]] = {}
        for name in names:
            by_layer.setdefault(name.split(".")[2], set()).add(tensors[name].data)
        assert by_layer
        assert all(len(scales) == 1 for scales in by_layer.values())


def test_the_codebooks_of_dflash2_hold_the_successors() -> None:
    target = build_target(SIZES["tiny"], 0)
    tensors = draft_tensors(target, DraftKind.DFLASH2)
    after = values(tensors["candidate_selector.predecessor_codebook"])
    codes = values(tensors["candidate_selector.successor_codebook"])
    best = (after @ codes.T).argmax(axis=1)
    assert [int(best[token]) for token in range(512)] == [target.successor(token) for token in range(512)]


def test_something_must_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--draft", "dflash"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "--draft-out" in capsys.readouterr().err
