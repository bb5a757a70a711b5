"""Pictures of µGraphs: layout of layered graphs, boxes and arrows as SVG."""
