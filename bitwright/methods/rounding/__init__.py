"""Choose weights on the grid: GPTQ, SeqMSE, AdaRound, FlexRound, block reconstruction."""
