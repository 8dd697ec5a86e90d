"""Text: `tokenizer` (ids), `chat_templates` (conversation -> pieces), `hub`
(is it in reach), and `builtin_processor`
(transformers' own tokenizer and processor of the built-in vocabulary). May import: samples.
"""
