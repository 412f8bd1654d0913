"""The only acceptance arithmetic of the project: training, evaluation, metrics and speculation all count here.

Pure Python and numpy; no model, no tensor library. Everything follows from one small array per row:

    runs[t] = how many leading tokens of a draft that starts at continuation position t equal the target's

For a greedy autoregressive drafter one teacher-forced forward is enough to know it. Up to its first mistake the
drafter has written exactly the target's tokens, so it has seen the same prefix as the teacher-forced forward:
with `bits[t]` = "is the argmax at position t the target's token?", `runs[t]` is the number of consecutive true
bits from t on (`run_lengths`). Other drafters (prompt lookup) fill `runs` by drafting at every position.

The replay protocol, for a continuation y[0] .. y[N-1] of the target and drafts of at most k tokens:

    start     the first round starts at position 1: y[0] is the target's own first token
    accepted  m = leading drafted tokens equal to the target's, at most k and at most N - start
    emitted   m + 1 (the bonus y[start + m] is the target's); m if the accepted tokens end the text: no bonus
    next      start + emitted
    dropped   in a row that was cut by length, a round whose window (k drafted tokens and the bonus, positions
              start .. start + k) passes the end is dropped, whatever it accepted: what follows is unknown, and
              keeping only the rounds that fail early would bias the mean down. Text that ended by a stop id
              has no such round: behind its last token there is nothing to guess.

    tau = tokens emitted / rounds, pooled over all rows (not a mean of per-row means)

Worked example, k = 2, a row that ended by itself with N = 6 and bits 1 1 1 0 1 1 (position 0 is never drafted):
    start 1: bits 1 0  -> accepted 1, emitted 2 (bonus y[2]?  no: y[1] accepted, y[2] accepted needs bit 2 = 1)
"""
