"""Tokenizer, chat template and detokenizer; needs no kernel, so the coordinator can use it alone."""
