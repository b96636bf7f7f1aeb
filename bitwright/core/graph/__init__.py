"""The data-flow graph that both front ends produce, the operator table, and analyses of a graph.

Patterns, recurrent steps, channels that never change, attention masks. No decision about quantization is made here.
"""
