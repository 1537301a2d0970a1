"""The journal of a broker or a site: records that must survive a crash, on disk before any message reveals them.

`journal` is the part to use; it gives the writing to one thread, which owns the files through `store`. `recovery`
decides at opening which records are intact, `reader` serves old records, `segments` and `watermark` are the two kinds
of file, `format` their bytes, and `disk` every step that touches the file system. Records are bytes here: the package
imports only `tops.model` (its errors) and knows nothing of what they mean.
"""

from tops.journal.disk import Disk
from tops.journal.journal import Journal
from tops.journal.recovery import Recovery
from tops.journal.store import JournalOptions, JournalStatistics

__all__ = ["Disk", "Journal", "JournalOptions", "JournalStatistics", "Recovery"]
