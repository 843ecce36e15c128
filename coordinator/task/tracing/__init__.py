"""Derive a plan from a torch module: follow dimensions through its graph to find width axes.

capture/       torch.export → an ATen graph, in training and in evaluation mode
factors.py     dimensions as products of factors: tie, split, freeze
walk.py        one pass over a graph;  operators.py handles each operator
masking.py     randomness as masks that are given
program.py     the graph at any width and batch size
check.py       a numerical check that nothing was missed
trace.py       `trace_plan`, `trace_model`: the plan and the programs
"""
