"""Keep kernels with their evidence on disk: keys, entries, and the stores that hold them.

- `key`: the key under which an entry is stored.
- `entry`: one kernel with its µGraph, schedules, times and digests, as a folder of files.
- `search_record`: all µGraphs that one search accepted.
- `machine`: the machine on which a measurement was made.
- `store`: folders of entries: the user's cache, the packaged zoo, and those that the user names.
"""
