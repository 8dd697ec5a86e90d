"""Text: `qwen_vocabulary`, `hub` (is it in reach) and `tokenizer` (ids), `chat_templates`
(conversation -> pieces), and `builtin_tokenizer` (transformers' own, of the built-in
vocabulary). May import: samples.
"""
