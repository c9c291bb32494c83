"""How a model is cut over ranks, as data: model shapes, pipeline schedules, placement of axes on ranks. Both halves use it."""
