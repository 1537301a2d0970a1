"""Any flipped byte and any cut of a journal's files is noticed; nothing damaged is ever read as a record."""

import os
import shutil
from pathlib import Path

import pytest

from tests.integration.journal.journal_support import (
    ROOMY,
    SMALL,
    UnsyncedDisk,
    files_in,
    opened,
    records_in,
    write_sample,
)
from tops.journal import Journal
from tops.journal.format import SEGMENT_HEADER_BYTES
from tops.model.errors import JournalCorrupt

COMMITS = [
    [b"alpha", b""],
    [b"beta" * 8],
    [b"x" * 120],
    [b"gamma", b"delta", b"epsilon"],
    [b"\0" * 40],
    [b"tail"] * 3,
    [b"end"],
]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def overwrite(path: Path, content: bytes) -> None:
    """In place: where a file is emptied first and filled again, some file systems wait for the disk."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def segments_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.segment"))


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_of_every_segment_is_refused_and_nothing_is_changed(journal: Path, mask: int) -> None:
    write_sample(journal, COMMITS)
    assert len(segments_of(journal)) >= 3

    for path in segments_of(journal):
        whole = path.read_bytes()
        for position in range(len(whole)):
            damaged = whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :]
            overwrite(path, damaged)
            before = files_in(journal)

            with pytest.raises(JournalCorrupt) as caught, opened(journal):
                pass

            assert caught.value.file == str(path)
            assert files_in(journal) == before
        overwrite(path, whole)


def test_every_cut_of_every_segment_is_refused_and_nothing_is_changed(journal: Path) -> None:
    write_sample(journal, COMMITS)

    for path in segments_of(journal):
        whole = path.read_bytes()
        for length in range(len(whole)):
            overwrite(path, whole[:length])

            with pytest.raises(JournalCorrupt), opened(journal):
                pass

            assert path.read_bytes() == whole[:length]
        overwrite(path, whole)


def test_every_flipped_byte_of_the_watermark_is_reported_and_no_record_is_lost(journal: Path) -> None:
    records = write_sample(journal, COMMITS)
    path = journal / "durable"
    whole = path.read_bytes()

    for position in range(len(whole)):
        overwrite(path, whole[:position] + bytes([whole[position] ^ (1 << position % 8)]) + whole[position + 1 :])
        with opened(journal, disk=UnsyncedDisk()) as store:
            assert store.recovery.damaged_watermarks == 1
            assert store.recovery.torn_bytes == 0
            assert records_in(store) == records

    with opened(journal, disk=UnsyncedDisk()) as store:
        assert store.recovery.damaged_watermarks == 0, "a damaged copy is renewed at the next open"


def test_every_cut_of_the_watermark_is_refused_or_reported(journal: Path) -> None:
    records = write_sample(journal, COMMITS)
    path = journal / "durable"
    whole = path.read_bytes()
    one_copy = len(whole) // 2

    for length in range(len(whole)):
        overwrite(path, whole[:length])
        if length < one_copy:
            with pytest.raises(JournalCorrupt, match="watermark"), opened(journal, disk=UnsyncedDisk()):
                pass
        else:
            with opened(journal, disk=UnsyncedDisk()) as store:
                assert store.recovery.damaged_watermarks == 1
                assert records_in(store) == records


def unmarked_tail(journal: Path) -> tuple[list[tuple[int, bytes]], Path, int]:
    """A journal whose last batch was written and not marked durable: a crash came before its acknowledgement."""
    write_sample(journal, COMMITS)
    mark = (journal / "durable").read_bytes()
    with opened(journal) as store:
        records = records_in(store)
        marked_bytes = store.segments[-1].end
        store.commit([b"never acknowledged", b"nor this"])
        last = store.segments[-1].path
    (journal / "durable").write_bytes(mark)
    return records, last, marked_bytes


def test_every_cut_beyond_the_watermark_is_cut_off_and_reported_to_the_byte(journal: Path, tmp_path: Path) -> None:
    records, last, marked_bytes = unmarked_tail(journal)
    whole = last.read_bytes()

    for length in range(marked_bytes, len(whole)):
        copy = tmp_path / "copy"
        shutil.copytree(journal, copy)
        os.truncate(copy / last.name, length)
        with opened(copy) as store:
            assert store.recovery.torn_bytes == length - marked_bytes
            assert records_in(store) == records
            store.commit([b"after the cut"])
        with opened(copy) as store:
            assert store.recovery.torn_bytes == 0
            assert [record for _, record in records_in(store)] == [*(record for _, record in records), b"after the cut"]
        shutil.rmtree(copy)


def test_every_flip_with_an_unmarked_tail_is_refused_below_the_mark_and_reported_above(
    journal: Path, tmp_path: Path
) -> None:
    records, last, marked_bytes = unmarked_tail(journal)
    whole = last.read_bytes()

    for position in range(len(whole)):
        copy = tmp_path / "copy"
        shutil.copytree(journal, copy)
        (copy / last.name).write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        if position < marked_bytes:
            with pytest.raises(JournalCorrupt), opened(copy):
                pass
        else:
            with opened(copy) as store:
                assert store.recovery.torn_bytes == len(whole) - marked_bytes
                assert store.recovery.torn_offset == marked_bytes
                assert records_in(store) == records
        shutil.rmtree(copy)


def test_a_whole_batch_beyond_the_watermark_is_kept(journal: Path) -> None:
    records, _, _ = unmarked_tail(journal)

    with opened(journal) as store:
        assert store.recovery.torn_bytes == 0
        assert [record for _, record in records_in(store)[len(records) :]] == [b"never acknowledged", b"nor this"]


def test_damage_that_a_valid_batch_follows_is_refused_even_without_a_newer_watermark(journal: Path) -> None:
    with opened(journal) as store:
        store.commit([b"first"])
        mark = (journal / "durable").read_bytes()
        damaged_at = store.segments[-1].end + 45
        store.commit([b"second"])
        store.commit([b"third"])
        path = store.segments[-1].path
    (journal / "durable").write_bytes(mark)
    data = bytearray(path.read_bytes())
    data[damaged_at] ^= 1
    overwrite(path, bytes(data))

    with pytest.raises(JournalCorrupt, match="a valid batch follows"), opened(journal):
        pass


def test_every_flip_in_a_rewritten_segment_is_refused_before_a_watermark_names_it(journal: Path) -> None:
    write_sample(journal, COMMITS)
    mark = (journal / "durable").read_bytes()
    with opened(journal) as store:
        store.rewrite([b"state", b"more state"])
        path = store.segments[-1].path
    whole = path.read_bytes()
    (journal / "durable").write_bytes(mark)

    for position in range(len(whole)):
        overwrite(path, whole[:position] + bytes([whole[position] ^ 0x04]) + whole[position + 1 :])
        with pytest.raises(JournalCorrupt), opened(journal):
            pass


def test_a_record_that_holds_a_copy_of_journal_bytes_does_not_pass_for_a_later_batch(journal: Path) -> None:
    with opened(journal) as store:
        store.commit([b"first"])
        mark = (journal / "durable").read_bytes()
        path, tail = store.segments[-1].path, store.segments[-1].end
        store.commit([path.read_bytes()])
    (journal / "durable").write_bytes(mark)
    os.truncate(path, path.stat().st_size - 1)

    with opened(journal) as store:
        assert records_in(store) == [(1, b"first")]
        assert store.recovery.torn_offset == tail


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_segment_is_refused(journal: Path, which: int) -> None:
    write_sample(journal, COMMITS)
    missing = segments_of(journal)[which]
    missing.unlink()

    with pytest.raises(JournalCorrupt, match="missing") as caught, opened(journal):
        pass

    assert caught.value.file == str(missing)


def test_swapped_segments_are_refused(journal: Path) -> None:
    write_sample(journal, COMMITS)
    one, two, *_ = segments_of(journal)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)

    with pytest.raises(JournalCorrupt, match="another number"), opened(journal):
        pass


def test_a_segment_of_another_journal_is_refused(journal: Path, tmp_path: Path) -> None:
    write_sample(journal, COMMITS)
    write_sample(tmp_path / "other", COMMITS)
    shutil.copy(segments_of(tmp_path / "other")[1], segments_of(journal)[1])

    with pytest.raises(JournalCorrupt, match="another journal"), opened(journal):
        pass


@pytest.mark.parametrize("change", ["drop", "swap", "repeat"])
def test_a_dropped_a_swapped_and_a_repeated_batch_are_refused(journal: Path, change: str) -> None:
    with opened(journal) as store:
        ends = [store.segments[-1].end]
        for record in (b"one", b"two", b"six"):
            store.commit([record])
            ends.append(store.segments[-1].end)
        path = store.segments[-1].path
    data = path.read_bytes()
    header, one, two, six = (data[start:end] for start, end in zip([0, *ends], ends, strict=False))
    overwrite(
        path, {"drop": header + one + six, "swap": header + two + one + six, "repeat": header + one + one + two}[change]
    )

    with pytest.raises(JournalCorrupt), opened(journal):
        pass


def test_a_missing_watermark_is_refused(journal: Path) -> None:
    write_sample(journal, COMMITS)
    (journal / "durable").unlink()

    with pytest.raises(JournalCorrupt, match="watermark is missing"), opened(journal):
        pass

    assert not (journal / "durable").exists()


async def test_damage_after_opening_is_found_when_the_record_is_read(journal: Path) -> None:
    records = write_sample(journal, COMMITS)
    async with Journal.open(journal, SMALL) as opened_journal:
        path = segments_of(journal)[1]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        overwrite(path, bytes(data))
        served: list[tuple[int, bytes]] = []

        with pytest.raises(JournalCorrupt) as caught:
            served.extend(opened_journal.read(1))

        assert caught.value.file == str(path)
        assert served == records[: len(served)]


async def test_a_refusal_names_the_file_the_place_and_what_to_do_and_releases_the_lock(journal: Path) -> None:
    records = write_sample(journal, COMMITS)
    path = segments_of(journal)[0]
    whole = path.read_bytes()
    overwrite(path, whole[:-1] + bytes([whole[-1] ^ 1]))

    with pytest.raises(JournalCorrupt, match=r"segment, byte \d+: .* restore it from a copy"):
        Journal.open(journal, SMALL)
    overwrite(path, whole)

    async with Journal.open(journal, SMALL) as mended:
        assert list(mended.read(1)) == records


def test_room_at_the_end_of_a_segment_holds_nothing_and_hides_nothing(journal: Path) -> None:
    records = write_sample(journal, [*COMMITS, [b"last"]], ROOMY)
    with opened(journal, ROOMY) as store:
        assert (records_in(store), store.recovery.torn_bytes) == (records, 0)
        ends = {segment.path: segment.end for segment in store.segments}
        path = store.segments[-1].path
    whole, end = path.read_bytes(), ends[path]
    assert len(whole) > end, "there is room"
    assert [p.stat().st_size for p in segments_of(journal)[:-1]] == [ends[p] for p in segments_of(journal)[:-1]]

    for position in range(len(whole)):
        overwrite(path, whole[:position] + bytes([whole[position] ^ 0x11]) + whole[position + 1 :])
        if position < end:
            with pytest.raises(JournalCorrupt), opened(journal, ROOMY):
                pass
        else:
            with opened(journal, ROOMY) as store:
                assert (records_in(store), store.recovery.torn_bytes) == (records, len(whole) - end)
    for length in range(end, len(whole)):
        overwrite(path, whole[:length])
        with opened(journal, ROOMY) as store:
            assert (records_in(store), store.recovery.torn_bytes) == (records, 0)


def test_a_last_batch_that_turned_into_zeros_is_missed(journal: Path) -> None:
    """Zeros pass for room only behind what was durable."""
    write_sample(journal, [*COMMITS, [b"last"]], ROOMY)
    for path in segments_of(journal):
        whole = path.read_bytes()
        overwrite(path, whole[:SEGMENT_HEADER_BYTES].ljust(len(whole), b"\0"))

        with pytest.raises(JournalCorrupt), opened(journal, ROOMY):
            pass
        overwrite(path, whole)
