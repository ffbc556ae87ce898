"""Greedy tokens against transformers: the same prompt and answer, teacher-forced in float32.

python3 reference.py MODELS FOLDER      reads FOLDER/*.case.json, writes FOLDER/reference.json

A token is right when it is the reference's own choice. Where it is not, the gap between the reference's logits (as
log-probabilities) of its own choice and of the token says whether the two were nearly tied. In a mixture of experts a
near tie can lie in a router instead: half precision then takes another expert than float32 does, and everything after
it in the answer differs. Such a token is listed with the smallest margin between the last expert taken and the first
one left, over all layers and the positions of the answer up to it.
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
MOST_ROUTED = 0.1
"""The same for tokens behind a near tie of a router: one such tie may change the rest of an answer."""
MOST_OTHERS = 0.02
"""The share of tokens that may be another than the reference's, all of them near ties."""


ROUTER_TIE = 0.01
"""In router logits, whose spread is about 1.5."""


class Routers:
    """Watches the routers of a model: the margin of their choice at each position, smallest over the layers."""

    def __init__(self, model: Any) -> None:
        self._taken = getattr(model.config, "num_experts_per_tok", 0)
        self._margins: list[torch.Tensor] = []
        for name, module in model.named_modules():
            if self._taken and name.endswith("mlp.gate"):
                module.register_forward_hook(self._watch)

    def _watch(self, module: Any, inputs: Any, output: Any) -> None:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
        logits = torch.nn.functional.linear(hidden, module.weight.float()).sort(-1, descending=True).values
        self._margins.append(logits[:, self._taken - 1] - logits[:, self._taken])

    def margins(self) -> torch.Tensor | None:
        """Of the last run; None for a model without routers."""
        found, self._margins = self._margins, []
        return torch.stack(found).min(0).values if found else None


@cache
def _routers(folder: str) -> Routers:
    return Routers(_model(folder))


@cache
def _model(folder: str) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def compare(folder: Path, answers: list[dict[str, list[int]]]) -> dict[str, Any]:
    """How many tokens were compared and equal, and each other one with its gap."""
    model, routers = _model(str(folder)), _routers(str(folder))
    total, others = 0, []
    for number, answer in enumerate(answers):
        prompt, tokens = answer["prompt"], answer["tokens"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device=model.device)).logits[0].float().log_softmax(-1)
        margins = routers.margins()
        for place, token in enumerate(tokens):
            row = logits[len(prompt) - 1 + place]
            total += 1
            if int(row.argmax()) != token:
                other = {"answer": number, "place": place, "gap": round(float(row.max() - row[token]), 5)}
                if margins is not None:
                    reached = margins[len(prompt) - 1 : len(prompt) + place]
                    other["router_margin"] = round(float(reached.min()), 5)
                others.append(other)
    return {"tokens": total, "equal": total - len(others), "others": others}


def verdict(found: dict[str, Any], e4m3: bool) -> dict[str, Any]:
    """With the rule applied: `passed`, and the bound."""
    bound = NEAR_TIE_E4M3 if e4m3 else NEAR_TIE
    routed = [other for other in found["others"] if other.get("router_margin", 1.0) < ROUTER_TIE]
    rest = [other for other in found["others"] if other not in routed]
    near = all(other["gap"] < bound for other in rest)
    few = len(rest) <= MOST_OTHERS * found["tokens"] and len(routed) <= MOST_ROUTED * found["tokens"]
    return {**found, "bound": bound, "routed": len(routed), "passed": near and few and found["tokens"] > 0}


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
