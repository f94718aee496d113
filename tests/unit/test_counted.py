from laurel.errors import counted, counted_that


def test_one_is_not_many() -> None:
    assert [counted(n, "row") for n in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    said = [counted_that(n, "row", verb) for verb in ("have", "were", "prefer") for n in (1, 2)]
    assert said == [
        "1 row has",
        "2 rows have",
        "1 row was",
        "2 rows were",
        "1 row prefers",
        "2 rows prefer",
    ]
