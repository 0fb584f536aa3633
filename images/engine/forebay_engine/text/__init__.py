"""Text: tokeniser, chat template, detokeniser, stop strings. No torch, no HTTP."""
