"""The journal of a broker or a site: what a node must not forget, on disk before anyone hears of it.

`journal` is the part to use; it gives the writing to one thread, which owns the files through `store`. `recovery`
decides at opening what is whole, `reader` serves old records, `segments` and `watermark` are the two kinds of file,
`format` their bytes, and `disk` every step that touches the file system.
"""

from tops.journal.disk import Disk
from tops.journal.journal import Journal
from tops.journal.recovery import Recovery
from tops.journal.store import JournalOptions, JournalStatistics

__all__ = ["Disk", "Journal", "JournalOptions", "JournalStatistics", "Recovery"]
