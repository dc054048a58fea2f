"""Holds a master's journal until it is killed: python hold_journal.py FILE."""

import asyncio
import signal
import sys
from pathlib import Path

from dlrover_py.master.journal_store import FileJournalStore

store = FileJournalStore(Path(sys.argv[1]))
asyncio.run(store.acquire())
print("held", flush=True)
signal.pause()
