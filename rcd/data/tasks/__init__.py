"""Generated tasks with known answers: word problems and small sudokus, each with a test side of unseen templates."""
