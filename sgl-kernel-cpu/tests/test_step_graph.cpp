// Graphs on teams of every kind: each task once, steps in order, whatever is thrown.
//
// Tasks write plain memory that the next step reads: under ThreadSanitizer a missing order shows.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/step_graph.h"

using namespace sgl_kernel;

namespace {

using Body = std::function<void()>;

// As many threads as asked for, which begin together.
void crew(int64_t threads, const Body& body) {
  std::atomic<int64_t> here{0};
  const auto begin_together = [&] {
    ++here;
    while (here < threads) std::this_thread::yield();
    body();
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < threads; ++i) helpers.emplace_back(begin_together);
  begin_together();
  for (std::thread& helper : helpers) helper.join();
}

void once(int64_t, const Body& body) {
  body();
}

void one_after_another(int64_t threads, const Body& body) {
  for (int64_t i = 0; i < threads; ++i) body();
}

// Helpers come one by one while the run is on, or after it.
void late_helpers(int64_t threads, const Body& body) {
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < threads; ++i) {
    helpers.emplace_back([&body, i] {
      std::this_thread::sleep_for(std::chrono::microseconds(20 * i * i));
      body();
    });
  }
  body();
  for (std::thread& helper : helpers) helper.join();
}

struct NamedTeam {
  const char* name;
  int64_t threads;
  Team team;
};

const std::vector<NamedTeam>& teams() {
  static const std::vector<NamedTeam> all = {
      {"1 thread", 1, crew},
      {"2 threads", 2, crew},
      {"5 threads", 5, crew},
      {"5 threads, the body once", 5, once},
      {"5 threads, one after another", 5, one_after_another},
      {"5 threads, late helpers", 5, late_helpers},
  };
  return all;
}

const std::vector<char>& fetched() {
  static const std::vector<char> memory(1 << 20);
  return memory;
}

// Steps that count how often each task ran, and look at all that the step before has written.
class Counted {
 public:
  explicit Counted(std::vector<int64_t> counts, int64_t grain = 1) : counts_(std::move(counts)) {
    for (size_t s = 0; s < counts_.size(); ++s) {
      runs_.emplace_back(static_cast<size_t>(counts_[s]), 0);
      // Threads that wait fetch what later steps read, if anything.
      const int64_t bytes[] = {0, 100, static_cast<int64_t>(fetched().size())};
      const Stream stream{s % 3 == 0 ? nullptr : fetched().data(), bytes[s % 3]};
      graph_.add(
          {[this, s] { return begin(s); }, grain, [this, s](TaskRange r) { run(s, r); }, stream});
    }
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

  // Called in the leader, and for each task in whichever runs it; both may throw.
  std::function<void(size_t step)> on_prepare = [](size_t) {};
  std::function<void(size_t step)> on_task = [](size_t) {};

  void set_counts(std::vector<int64_t> counts) {
    counts_ = std::move(counts);
    forget();
  }
  void forget() {
    for (size_t s = 0; s < runs_.size(); ++s) {
      runs_[s].assign(static_cast<size_t>(counts_[s]), 0);
    }
    repetitions_ = 0;
  }

  void replay(const NamedTeam& team) {
    ++repetitions_;
    graph_.run(team.threads, team.team);
  }

  // Every task of steps [begin, end) ran as often as the graph.
  bool complete(size_t begin, size_t end) const {
    for (size_t s = begin; s < end; ++s) {
      for (const int runs : runs_[s]) {
        if (runs != repetitions_) return false;
      }
    }
    return true;
  }
  bool complete() const { return complete(0, runs_.size()); }
  bool untouched(size_t begin) const {
    for (size_t s = begin; s < runs_.size(); ++s) {
      for (const int runs : runs_[s]) {
        if (runs != 0) return false;
      }
    }
    return true;
  }
  bool in_order() const { return early_ == 0; }
  int64_t calls() const { return calls_; }

 private:
  int64_t begin(size_t s) {
    on_prepare(s);
    if (s > 0 && !complete(s - 1, s)) ++early_;
    return counts_[s];
  }

  void run(size_t s, TaskRange tasks) {
    ++calls_;
    if (s > 0 && !complete(s - 1, s)) ++early_;
    for (int64_t t = tasks.begin; t < tasks.end; ++t) {
      on_task(s);
      ++runs_[s][static_cast<size_t>(t)];
    }
  }

  std::vector<int64_t> counts_;
  std::vector<std::vector<int>> runs_;
  int repetitions_ = 0;
  std::atomic<int64_t> calls_{0};
  std::atomic<int> early_{0};
  StepGraph graph_;
};

template <typename Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing thrown";
}

}  // namespace

TEST(every_task_runs_once_and_steps_in_order) {
  for (const NamedTeam& team : teams()) {
    for (const int64_t grain : {1, 4, 1000}) {
      Counted graph({1, 0, 3, 300, 0, 0, 7, 1, 299, 5, 16, 4}, grain);
      for (int i = 0; i < 20; ++i) graph.replay(team);
      CHECK(graph.complete(), "%s, grain %ld", team.name, (long)grain);
      CHECK(graph.in_order(), "%s, grain %ld", team.name, (long)grain);
    }
  }
}

TEST(many_short_runs) {
  for (const NamedTeam& team : teams()) {
    Counted graph({2, 9, 1, 5, 3, 6, 2, 2, 8, 4});
    for (int i = 0; i < 500; ++i) graph.replay(team);
    CHECK(graph.complete() && graph.in_order(), "%s", team.name);
  }
}

TEST(an_empty_graph_and_one_without_tasks) {
  for (const NamedTeam& team : teams()) {
    StepGraph().run(team.threads, team.team);
    Counted graph({0, 0});
    graph.replay(team);
    CHECK(graph.calls() == 0, "%s", team.name);
  }
}

TEST(counts_may_change_between_runs) {
  for (const NamedTeam& team : teams()) {
    Counted graph({40, 1, 0});
    for (const std::vector<int64_t>& counts :
         {std::vector<int64_t>{40, 1, 0}, {0, 50, 2}, {7, 0, 90}, {1, 1, 1}}) {
      graph.set_counts(counts);
      for (int i = 0; i < 3; ++i) graph.replay(team);
      CHECK(graph.complete() && graph.in_order(), "%s", team.name);
    }
  }
}

TEST(a_step_and_the_one_before_it_run_in_turns) {
  for (const NamedTeam& team : teams()) {
    constexpr int kTurns = 7;
    // Tasks of the turn, then of the step that looks at them; the last turn has fewer.
    std::vector<int> made(40, 0), seen(40, 0);
    int turn = 0, before = 0, behind = 0, early = 0;
    StepGraph graph;
    graph.add({[&] { return turn = 0, ++before, 1; }, 1, [](TaskRange) {}, {}});
    graph.add({[] { return 40; },
               1,
               [&](TaskRange r) {
                 for (int64_t t = r.begin; t < r.end; ++t) ++made[static_cast<size_t>(t)];
               },
               {}});
    graph.add({[] { return 40; },
               1,
               [&](TaskRange r) {
                 for (int64_t t = r.begin; t < r.end; ++t) {
                   seen[static_cast<size_t>(t)] += made[static_cast<size_t>(t)];
                 }
               },
               {},
               [&]() -> int64_t { return ++turn == kTurns     ? -1
                                         : turn + 1 == kTurns ? 9
                                                              : 40; }});
    graph.add({[&] { return early += made[39] % (kTurns - 1) != 0, ++behind, 0; },
               1,
               [](TaskRange) {},
               {}});
    for (int i = 1; i <= 30; ++i) {
      std::fill(made.begin(), made.end(), 0);
      std::fill(seen.begin(), seen.end(), 0);
      graph.run(team.threads, team.team);
      // 1 + 2 + ... turns; those of the last turn once more.
      for (size_t t = 0; t < 40; ++t) {
        const int times = t < 9 ? kTurns : kTurns - 1;
        const int sum = t < 9 ? kTurns * (kTurns + 1) / 2 : kTurns * (kTurns - 1) / 2 + kTurns - 1;
        CHECK(made[t] == times && seen[t] == sum, "%s: task %d: %d, %d", team.name, (int)t, made[t],
              seen[t]);
      }
      CHECK(before == i && behind == i && early == 0, "%s: steps around run once", team.name);
    }
  }
}

TEST(what_a_turn_throws_ends_the_run) {
  for (const NamedTeam& team : teams()) {
    StepGraph graph;
    std::atomic<int> first{0}, behind{0};
    graph.add({[] { return 20; },
               1,
               [&](TaskRange r) { first += static_cast<int>(r.end - r.begin); },
               {}});
    int turn = 0;
    graph.add({[] { return 3; },
               1,
               [](TaskRange) {},
               {},
               [&]() -> int64_t {
                 if (++turn == 3) throw std::runtime_error("again");
                 return 20;
               }});
    graph.add({[&] { return ++behind, 0; }, 1, [](TaskRange) {}, {}});
    const std::string message = message_of([&] { graph.run(team.threads, team.team); });
    CHECK(message == "again" && first == 60 && behind == 0, "%s: %s", team.name, message.c_str());
  }
}

TEST(work_below_the_grain_stays_in_one_piece) {
  for (const NamedTeam& team : teams()) {
    Counted graph({1, 15, 16}, 16);
    graph.replay(team);
    CHECK(graph.calls() == 3 && graph.complete(), "%s: %ld calls", team.name, (long)graph.calls());
  }
}

TEST(a_call_takes_at_least_the_grain) {
  constexpr int64_t kGrain = 10;
  for (const NamedTeam& team : teams()) {
    for (const int64_t count : {100, 399, 1000}) {
      StepGraph graph;
      std::atomic<int64_t> tasks{0}, small{0};
      graph.add({[=] { return count; },
                 kGrain,
                 [&](TaskRange r) {
                   tasks += r.end - r.begin;
                   if (r.end - r.begin < kGrain) ++small;
                 },
                 {}});
      graph.run(team.threads, team.team);
      CHECK(tasks == count && small == 0, "%s: %ld of %ld tasks, %ld small calls", team.name,
            (long)tasks, (long)count, (long)small);
    }
  }
}

TEST(more_tasks_than_a_work_queue_can_count_run_in_one_piece) {
  const int64_t count = int64_t{1} << 24;
  StepGraph graph;
  std::atomic<int64_t> calls{0}, tasks{0};
  graph.add({[] { return count; },
             1,
             [&](TaskRange r) {
               ++calls;
               tasks += r.end - r.begin;
             },
             {}});
  graph.run(5, crew);
  CHECK(calls == 1 && tasks == count, "%ld calls", (long)calls);
}

TEST(a_graph_refuses_more_steps_than_it_can_number) {
  StepGraph graph;
  int64_t runs = 0;
  const Step step = {[&] { return ++runs, 0; }, 1, [](TaskRange) {}, {}};
  for (int i = 0; i < 65534; ++i) graph.add(step);
  CHECK(message_of([&] { graph.add(step); }) == "a graph holds at most 65534 steps", "refused");
  CHECK(graph.size() == 65534, "%ld steps", (long)graph.size());
  graph.run(2, crew);
  CHECK(runs == 65534, "%ld steps ran", (long)runs);
}

TEST(the_last_step_of_a_full_graph_is_shared) {
  StepGraph graph;
  for (int i = 0; i < 65533; ++i) graph.add({[] { return 0; }, 1, [](TaskRange) {}, {}});
  std::vector<int> runs(100, 0);
  graph.add({[] { return 100; },
             1,
             [&](TaskRange r) {
               for (int64_t t = r.begin; t < r.end; ++t) ++runs[static_cast<size_t>(t)];
             },
             {}});
  graph.run(5, crew);
  CHECK(std::all_of(runs.begin(), runs.end(), [](int n) { return n == 1; }), "each once");
}

TEST(what_prepare_throws_ends_the_run) {
  for (const NamedTeam& team : teams()) {
    Counted graph({20, 30, 40, 50});
    graph.on_prepare = [](size_t step) {
      if (step == 2) throw std::runtime_error("prepare");
    };
    for (int i = 0; i < 50; ++i) {
      graph.forget();
      const std::string message = message_of([&] { graph.replay(team); });
      CHECK(message == "prepare", "%s: %s", team.name, message.c_str());
      CHECK(graph.complete(0, 2) && graph.untouched(2), "%s", team.name);
    }
    graph.on_prepare = [](size_t) {};
    graph.forget();
    graph.replay(team);
    CHECK(graph.complete() && graph.in_order(), "%s, again", team.name);
  }
}

TEST(what_a_task_throws_ends_the_run_on_whichever_thread) {
  for (const int64_t threads : {2, 5}) {
    for (const bool by_leader : {true, false}) {
      const NamedTeam team = {by_leader ? "leader" : "worker", threads, crew};
      Counted graph({20, 30, 40, 50});
      std::thread::id leader;
      std::atomic<bool> thrown{false};
      graph.on_prepare = [&](size_t) { leader = std::this_thread::get_id(); };
      const auto throw_in_step_1 = [&](size_t step) {
        if (step != 1) return;
        if ((std::this_thread::get_id() == leader) == by_leader) {
          thrown = true;
          throw std::runtime_error("task");
        }
        // So that the other kind of thread gets a task.
        while (!thrown) std::this_thread::yield();
      };
      for (int i = 0; i < 50; ++i) {
        graph.on_task = throw_in_step_1;
        graph.forget();
        thrown = false;
        const std::string message = message_of([&] { graph.replay(team); });
        CHECK(message == "task", "%s of %ld: %s", team.name, (long)threads, message.c_str());
        CHECK(graph.complete(0, 1) && graph.untouched(2), "%s of %ld", team.name, (long)threads);

        graph.on_task = [](size_t) {};
        graph.forget();
        graph.replay(team);
        CHECK(graph.complete(), "%s of %ld, again", team.name, (long)threads);
      }
    }
  }
}

TEST(only_one_of_many_exceptions_is_thrown_on) {
  for (const NamedTeam& team : teams()) {
    Counted graph({64, 64});
    graph.on_task = [](size_t) { throw std::runtime_error("each"); };
    const std::string message = message_of([&] { graph.replay(team); });
    CHECK(message == "each" && graph.untouched(0), "%s: %s", team.name, message.c_str());
  }
}
