"""The blocks that optimize() looks for, one small declarative file each."""
