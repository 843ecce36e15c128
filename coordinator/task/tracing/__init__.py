"""From a torch module to a plan: finds width axes by following dimensions through its graph.

capture.py     torch.export → an ATen graph, in training and in evaluation mode
factors.py     dimensions as products of factors: tie, split, freeze
walk.py        one pass over a graph;  operators.py says what each operator does
program.py     the graph at any width and batch size
check.py       a check by numbers that nothing was missed
trace.py       `trace_plan`, `trace_model`: the plan and the programs
"""
