"""Text and tokens: request bodies, chat templates, tokenizer, tool and reasoning parsers, grammars, sampling fields."""
