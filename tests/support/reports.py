"""A document with every part of a report, and an analysis of any size."""

from __future__ import annotations

from typing import Any

import numpy as np


def analysis(layers: int = 6, channels: int = 8, seed: int = 0) -> dict[str, Any]:
    """What ``Analysis.to_dict()`` returns, of a chain with residual additions in nested modules."""
    random = np.random.default_rng(seed)
    sites: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for i in range(layers):
        name = f"stage{i // 32}.block{i // 8 % 4}.conv{i % 8}"
        noise = float(10.0 ** random.uniform(-6, -2))
        values = random.normal(size=500)
        counts, edges = np.histogram(values, 32)
        for role in ("weight", "output"):
            bounds = np.sort(random.normal(size=(2, channels)), axis=0)
            sites.append({
                "name": f"{name}.{role}" + ("[0]" if role == "output" else ""), "role": role, "layer": name, "op": "Conv",
                "dtype": "int8", "bits": 8, "enabled": True, "why_float": "", "noise": noise / 2,
                "sqnr_db": -10 * float(np.log10(noise / 2)), "only_db": None, "without_db": None, "metric_only": None,
                "metric_without": None, "codes_used": 0.4, "clipped": 0.01, "lsb": 0.02, "minimum": -3.0, "maximum": 3.0,
                "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
                "grid": {"low": -2.0, "high": 2.0, "steps": 255},
                "channels": {"low": bounds[0].tolist(), "high": bounds[1].tolist()},
            })  # fmt: skip
        cause = {"cause": "outlier", "text": f"few codes used at {name}", "evidence": {}, "remedy": "widen"}
        before = [rows[-1]["name"]] if rows else []
        rows.append({
            "name": name, "op": "Conv", "sites": [site["name"] for site in sites[-2:]],
            "inputs": before + ([rows[-3]["name"]] if i > 3 and i % 4 == 0 else []), "noise": noise, "made_db": 30.0 + i % 7,
            "made_quantized_db": 30.0, "arrived_db": 35.0, "after_db": 28.0, "made_lsb": 0.4, "jump": 1.0,
            "causes": [cause] if i == 2 else [],
        })  # fmt: skip
    return {
        "format": "bitwright-analysis", "version": 1, "mode": "fast", "notes": ["a note of the analysis"],
        "model": {"name": "net", "front_end": "torch", "parameters": 1000, "bytes_float": 4000, "bytes_quantized": 1000},
        "data": {"samples": 32, "passes": 7.5},
        "metric": {"name": "accuracy", "float": 0.9, "quantized": 0.87, "better": "higher", "difference": {
            "estimate": -0.03, "low": -0.05, "high": -0.01, "confidence": 0.95, "n": 400, "test": "McNemar",
            "distinguishable": True, "needed": None, "text": "3 points lost, with certainty"}},
        "output": {"sqnr_db": 24.5, "kl": 0.01},
        "sites": sites, "layers": sorted(rows, key=lambda row: -row["noise"]),
        "groups": [{"name": "all weights", "sites": [], "noise": 0.001, "only_db": 30.0, "without_db": None}],
        "remedies": [{"remedy": "widen", "layers": [rows[0]["name"]], "before_db": 24.5, "after_db": 29.0,
                      "metric_before": 0.87, "metric_after": 0.89, "kept": True}],
    }  # fmt: skip


def parts() -> dict[str, Any]:
    """The other parts of a report, as the dictionaries that reports give."""
    agreement = {"equal": 1.0, "lsb": 0.0}
    row = {"site": "a", "run": 0, "tensor": "t", "format": "int8", "ops": ["Conv"], "kernel": "QLinearConv",
           "as_float": agreement, "as_integer": {"equal": 0.5, "lsb": 3.0}, "reason": "a reason", "verdict": "fails"}  # fmt: skip
    return {
        "coverage": {
            "counts": {"quantized": 3, "float": 1}, "notes": ["a rule matched nothing"], "unseen": [],
            "rows": [{"name": "v", "kind": "activation", "op_type": "Log", "shape": [1, 2], "status": "float",
                      "how": "a logarithm reads it"}],
        },
        "recipe": {"judged": "on 32 samples", "outcomes": [
            {"step": "fold", "metric": 0.8, "change": None, "note": "", "kept": True, "sqnr": None},
            {"step": "gptq", "metric": 0.87, "change": 0.07, "note": "5 layers", "kept": True, "sqnr": [20.0, 24.5]}]},
        "health": {"rows": [{"site": "a", "notes": ["3 zero channels"]}]},
        "verification": {"ok": False, "rows": [row], "outputs": [{"name": "y", "as_float": "inf", "as_integer": 40.0}],
                         "unchecked": {}, "failures": {}, "idle": {}},
        "pareto": {"x": "bytes", "y": "accuracy", "points": [
            {"x": 1000, "y": 0.8, "label": "w4"}, {"x": 2000, "y": 0.87, "label": "w8", "chosen": True}]},
        "files": [{"name": "net.onnx", "size": 2000}],
        "notes": ["a note of the report"],
    }  # fmt: skip
