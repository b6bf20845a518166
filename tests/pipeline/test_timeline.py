from offstage.pipeline.timeline import MOST_POINTS, Timeline


def test_points_are_the_peaks_of_their_spans() -> None:
    line = Timeline(span_seconds=1.0)
    for seconds, value in [(0.1, 3), (0.2, 9), (0.9, 4), (2.5, 7)]:
        line.add(seconds, value)
    assert line.points == [(0.0, 9), (2.0, 7)]


def test_a_long_run_keeps_few_points_and_every_peak() -> None:
    line = Timeline(span_seconds=0.01)
    for step in range(100_000):
        line.add(step * 0.01, 10**9 if step == 77_777 else step)
    points = line.points
    assert len(points) <= MOST_POINTS
    assert max(value for _, value in points) == 10**9
    assert [seconds for seconds, _ in points] == sorted(seconds for seconds, _ in points)
