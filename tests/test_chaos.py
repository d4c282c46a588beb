"""SIGKILL at random moments loses no record and leaves no orphan: a sample of benchmarks/chaos.py."""

import signal

import chaos
import chaos_jobs
import psutil
import pytest


@pytest.mark.slow("each kill waits for a campaign to be under way")
def test_kills_in_campaigns_of_fake_cells_lose_nothing(tmp_path, fake_interpreter):
    report = chaos.run(kills=4, seed=1, fake_only=True, folder=tmp_path)
    assert report.problems == []
    assert report.kills.total() == 4


def test_kills_in_campaigns_with_llamacpp_lose_nothing(tmp_path, llamacpp_interpreter):
    report = chaos.run(kills=3, seed=2, fake_only=False, folder=tmp_path)
    assert report.problems == []
    assert report.kills.total() == 3


def test_the_check_sees_a_lost_a_changed_and_a_cut_file(tmp_path, fake_interpreter):
    place = chaos.Place(tmp_path, fake_only=True)
    place.prepare()
    ran = chaos.finish(place, 0)
    assert ran.returncode == 0 or "stayed disturbed" in ran.stderr, ran.stderr
    watch, report = chaos.Watch(place.results), chaos.Report()
    watch.check(report)
    assert report.problems == []
    lost, changed, cut, *_ = sorted(place.results.rglob("record.json"))
    lost.unlink()
    changed.write_text(changed.read_text() + " ")
    (cut.parent / "tokens.parquet").write_bytes(b"PAR1")
    watch.check(report)
    assert sorted(problem.split(":")[0] for problem in report.problems) == ["changed", "changed", "lost"]
    anew = chaos.Report()
    chaos.Watch(place.results).check(anew)
    assert len(anew.problems) == 1
    assert "not a series" in anew.problems[0]


def test_the_check_sees_an_orphan(tmp_path, fake_interpreter):
    place = chaos.Place(tmp_path, fake_only=True)
    place.prepare()
    controller = chaos.start(place, 0)
    worker = chaos.worker_of(psutil.Process(controller.pid), within_s=120)
    try:
        assert worker.pid in chaos_jobs.running(tmp_path)
    finally:
        controller.send_signal(signal.SIGKILL)
        controller.communicate()
    assert chaos_jobs.wait_gone(tmp_path, [worker]) == []
