"""Life of a generation request, the same for every front: check, reserve, tokenize, submit, read.

A front makes a `request.GenerationRequest` and enters `life.begin`; inside the block it reads `choice.Choice`s and
writes their `pieces.Piece`s. See docs/structure.md, "A new front".
"""
