"""What engines speak: prefill/decode exchanges and their dialects, both directions."""
