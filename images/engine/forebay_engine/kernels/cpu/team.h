/* A team of threads that run one job together: the caller and size - 1 others, which sleep between jobs. */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS = 4000 }; /* of a barrier, some 20 us; then it yields, since the machine may have fewer free cores than the team */

typedef void job_function(void *job, long part);

typedef struct {
    long size;
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    long started; /* jobs so far, under the lock */
    int ending;
    job_function *run;
    void *job;
    atomic_long arrived, passed;
} team;

typedef struct {
    team *of;
    long part;
} member;

/* Every member calls it; none returns before all have. */
static void meet(team *t) {
    if (t->size == 1) return;
    long turn = atomic_load_explicit(&t->passed, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->size - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&t->passed, turn + 1, memory_order_release);
        return;
    }
    for (long i = 0; atomic_load_explicit(&t->passed, memory_order_acquire) == turn; i++) {
        if (i > SPINS) sched_yield();
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}

static void *member_main(void *argument) {
    member me = *(member *)argument;
    free(argument);
    team *t = me.of;
    long done = 0;
    for (;;) {
        pthread_mutex_lock(&t->lock);
        while (t->started == done && !t->ending) pthread_cond_wait(&t->wake, &t->lock);
        int ending = t->ending;
        pthread_mutex_unlock(&t->lock);
        if (ending) return 0;
        done++;
        t->run(t->job, me.part);
        meet(t);
    }
}

static void run_together(team *t, job_function *run, void *job) {
    if (t->size > 1) {
        pthread_mutex_lock(&t->lock);
        t->run = run;
        t->job = job;
        t->started++;
        pthread_cond_broadcast(&t->wake);
        pthread_mutex_unlock(&t->lock);
    }
    run(job, 0);
    meet(t);
}

static void disband(team *t) {
    pthread_mutex_lock(&t->lock);
    t->ending = 1;
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
    for (long i = 1; i < t->size; i++) pthread_join(t->threads[i], 0);
    free(t->threads);
    free(t);
}

/* NULL when memory or threads can't be had. */
static team *gather(long size) {
    team *t = calloc(1, sizeof *t);
    if (!t) return 0;
    t->size = 1;
    pthread_mutex_init(&t->lock, 0);
    pthread_cond_init(&t->wake, 0);
    t->threads = calloc(size, sizeof *t->threads);
    for (long i = 1; t->threads && i < size; i++) {
        member *m = malloc(sizeof *m);
        if (m) *m = (member){t, i};
        if (!m || pthread_create(&t->threads[i], 0, member_main, m)) {
            free(m);
            break;
        }
        t->size = i + 1;
    }
    if (t->threads && t->size == size) return t;
    disband(t);
    return 0;
}
