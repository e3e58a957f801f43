"""`treadle` with a short history of block events: a subscriber that reads nothing is soon behind."""

from treadle.cli import main
from treadle.engine import block_event_feeds

if __name__ == "__main__":
    block_event_feeds.HISTORY_EVENTS = 100
    main()
