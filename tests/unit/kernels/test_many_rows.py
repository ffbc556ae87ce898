"""The table of many rows says what was timed, and what was not."""

from sm70_engine.kernels.many_rows import ManyRows, markdown


def test_rates_and_the_table() -> None:
    few = ManyRows(128, 4096, 1024, 50.0, 0.0, 0.0, 25.0)
    many = ManyRows(1024, 4096, 1024, 100.0, 30.0, 60.0, 50.0)
    assert many.tflops == 2 * 1024 * 4096 * 1024 / 100e-6 * 1e-12
    assert many.as_dict()["torch_tflops"] == round(2 * many.tflops, 1)
    head, _, first, second = markdown([few, many]).strip().split("\n")
    assert "two launches of few rows" in first
    assert "30.0 | 60.0" in second
    assert first.count("|") == second.count("|") == head.count("|")
