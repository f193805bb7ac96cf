"""Log files can be cut back and continued without a trace."""

import json
import math
import struct

import pytest

from mage_jax.train.metrics import JsonLines, MetricsError, RunLog, read_lines, truncate_lines
from mage_jax.train.plots import plot_run
from mage_jax.train.runtime import Clock


def test_lines_past_the_step_and_half_lines_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path, after_step=0)
    for step in range(1, 6):
        log.write({"step": step, "loss": 1 / step})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4, 5]
    assert truncate_lines(path, after_step=3) == 3
    log = JsonLines(path, after_step=3)
    log.write({"step": 4, "loss": 0.25})
    log.sync()
    log.close()
    text = "".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 5))
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_a_file_of_someone_else_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(MetricsError, match=r"metrics\.jsonl:2: is not a line of this run"):
        JsonLines(path, after_step=5)
    assert "hello" in path.read_text()


def test_floats_keep_their_bits_and_nan_is_never_written(tmp_path):
    log = JsonLines(tmp_path / "x.jsonl", after_step=0)
    values = [math.pi, 1e-300, 0.1 + 0.2, struct.unpack("f", b"\x01\x02\x03\x04")[0]]
    log.write({"step": 1, "values": values})
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.write({"step": 2, "loss": math.nan})
    assert read_lines(tmp_path / "x.jsonl")[0]["values"] == values


def test_only_process_0_writes_metrics_and_each_its_samples(tmp_path):
    for index in range(2):
        with RunLog(tmp_path, step=0, total_steps=3, process_index=index, process_count=2) as log:
            log.metrics(1, {"loss": 1.0 + index})
            log.consumed(1, [[f"host-{index}"]])
            log.progress(1)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
    assert read_lines(tmp_path / "consumed-1-of-2.jsonl") == [{"step": 1, "samples": [["host-1"]]}]


def test_the_clock_excludes_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock()
    clock.add(tokens=7)  # compiled
    assert clock.first()
    now[0] = 100.0
    clock.restart()
    for _ in range(4):
        with clock.waiting_for_data():
            now[0] += 0.5
        now[0] += 1.5
        clock.add(tokens=100)
    with clock.paused():
        now[0] += 1000
    fields = clock.take()
    assert (fields["tokens_per_second"], fields["seconds_per_step"], fields["data_wait"]) == (50, 2, 0.25)
    assert "tokens_per_second" not in clock.take()


def test_plots_need_metrics(tmp_path):
    with pytest.raises(MetricsError, match="holds no metrics yet"):
        plot_run(tmp_path)
