"""The same as append_log.py with a file that is written at its offset, without O_APPEND."""

import append_log

append_log.main(0)
