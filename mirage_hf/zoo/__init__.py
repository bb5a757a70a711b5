"""Keep kernels with their evidence on disk: keys, entries, and the stores that hold them.

- `key`: what an entry is stored under.
- `entry`: one kernel with its µGraph, schedules, times and digests, as a folder of files.
- `search_record`: all µGraphs that one search accepted.
- `machine`: what a measurement was made on.
- `store`: folders of entries: the user's cache, the packaged zoo, and those that the user names.
"""
