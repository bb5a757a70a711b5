// The normal forms of a program's nodes.
#pragma once
#include <optional>

#include "core/algebra/normal_form.h"
#include "core/program.h"

namespace mirage {

using NodeForms = IdVector<ProgramNodeId, std::optional<FormId>>;

// Returns the form of each node; none if a constant overflows or a division is by zero.
NodeForms forms_of(const Program& program, NormalForms& forms);

// Replaces each maximum that cancels out of every output, such as the shift of a softmax, by 0.
// A shift keeps numbers in range; it is put back into the kernels that are found.
Program without_shifts(const Program& program);

// Returns which nodes the outputs need. Of several nodes with one form (x, x·1, −(−x)) the first
// stands for all.
IdVector<ProgramNodeId, bool> needed_nodes(const Program& program, const NodeForms& forms);

}  // namespace mirage
