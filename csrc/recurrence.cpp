// The recurrence of linear attention with decays and the delta rule, forward and backward.
#include "dot.h"
#include "recurrence_backward.h"

namespace regard::REGARD_ISA {

namespace {
template <class Job> int run_job(Job job, int threads) { return parallel(threads, job); }
}  // namespace

int recurrence_forward(const regard_recurrence& x, const regard_recurrence_result& result) {
  if (x.dtype == REGARD_FLOAT64) return run_job(RecurrenceForward<double>(x, result), x.threads);
  return run_job(RecurrenceForward<float>(x, result), x.threads);
}

int recurrence_backward(const regard_recurrence& x, const regard_recurrence_gradient& gradient) {
  if (x.dtype == REGARD_FLOAT64) return run_job(RecurrenceBackward<double>(x, gradient), x.threads);
  return run_job(RecurrenceBackward<float>(x, gradient), x.threads);
}

}  // namespace regard::REGARD_ISA
