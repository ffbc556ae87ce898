"""Greedy tokens against transformers: the same prompt and answer, teacher-forced in float32.

python3 reference.py MODELS FOLDER      reads FOLDER/*.case.json, writes FOLDER/reference.json

A token is right when it is the reference's own choice. Where it is not, the gap between the reference's logits (as
log-probabilities) of its own choice and of the token says whether the two were nearly tied.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

NEAR_TIE, NEAR_TIE_E4M3 = 0.01, 0.13
MOST_OTHERS = 0.02
"""The share of tokens that may be another than the reference's, all of them near ties."""


@cache
def _model(folder: str) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def compare(folder: Path, answers: list[dict[str, list[int]]]) -> dict[str, Any]:
    """How many tokens were compared and equal, and each other one with its gap."""
    model = _model(str(folder))
    total, others = 0, []
    for number, answer in enumerate(answers):
        prompt, tokens = answer["prompt"], answer["tokens"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device=model.device)).logits[0].float().log_softmax(-1)
        for place, token in enumerate(tokens):
            row = logits[len(prompt) - 1 + place]
            total += 1
            if int(row.argmax()) != token:
                others.append({"answer": number, "place": place, "gap": round(float(row.max() - row[token]), 5)})
    return {"tokens": total, "equal": total - len(others), "others": others}


def verdict(found: dict[str, Any], e4m3: bool) -> dict[str, Any]:
    """With the rule applied: `passed`, and the bound."""
    bound = NEAR_TIE_E4M3 if e4m3 else NEAR_TIE
    near = all(other["gap"] < bound for other in found["others"])
    few = len(found["others"]) <= MOST_OTHERS * found["tokens"]
    return {**found, "bound": bound, "passed": near and few and found["tokens"] > 0}


def main() -> int:
    models, folder = Path(sys.argv[1]), Path(sys.argv[2])
    results = {}
    for path in sorted(folder.glob("*.case.json")):
        case = json.loads(path.read_text())
        if not case.get("answers"):
            continue
        name = path.name.removesuffix(".case.json")
        results[name] = verdict(compare(models / case["reference"], case["answers"]), case["e4m3"])
        print(name, json.dumps(results[name])[:300], flush=True)
    (folder / "reference.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0 if results and all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
