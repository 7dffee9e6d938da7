//! Tokens for rangecache's own user: Authenticate calls.

use std::{sync::Arc, time::Duration};

use etcd_wire::etcdserverpb::{AuthenticateRequest, auth_client::AuthClient};
use http::HeaderValue;
use tonic::Code;

use super::credentials::{Credentials, Token, UserProblem};
use super::flags::{Account, Secret};
use super::{backoff::Backoff, connection::Connection, transport::NoEndpoint};

/// Timeout of one Authenticate call.
pub(super) const AUTHENTICATE_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause before a token is requested again.
const BACKOFF_FIRST: Duration = Duration::from_millis(200);
/// Longest such pause: each attempt costs etcd as much as thousands of reads.
const BACKOFF_LAST: Duration = Duration::from_secs(30);

/// Requests a token over `connection` once, without an [`Upstream`](super::Upstream) that would do so repeatedly.
///
/// # Errors
/// etcd's status if it rejects user or password, or `DeadlineExceeded`.
pub async fn authenticate_once(
    credentials: &Credentials,
    connection: &Arc<Connection>,
) -> Result<(), tonic::Status> {
    let Some(account) = &credentials.account else {
        return Ok(());
    };
    let token = authenticate(account, connection).await;
    credentials
        .token
        .send_replace(token.as_ref().map_or(Token::Refused, Token::clone));
    token.map(drop)
}

/// Requests a token whenever one is wanted, over a connection that `connect` returns; runs until cancelled.
pub(super) async fn keep_authenticated<F>(credentials: &Credentials, connect: impl Fn() -> F)
where
    F: Future<Output = Result<Arc<Connection>, NoEndpoint>>,
{
    let Some(account) = &credentials.account else {
        return;
    };
    let mut changed = credentials.token.subscribe();
    let mut backoff = Backoff::new(BACKOFF_FIRST, BACKOFF_LAST);
    loop {
        let wanted = changed.wait_for(|token| matches!(token, Token::Wanted));
        if wanted.await.is_err() {
            return;
        }
        let token = match connect().await {
            Ok(connection) => authenticate(account, &connection).await,
            Err(error) => Err(tonic::Status::unavailable(error.to_string())),
        };
        match token {
            Ok(token) => {
                if matches!(token, Token::Have(_)) {
                    tracing::info!(
                        user = account.name,
                        "etcd's auth is on: authenticated as the user of --user"
                    );
                }
                credentials.token.send_replace(token);
                // A token that is rejected at once must not cause a stream of Authenticate calls.
                tokio::time::sleep(BACKOFF_FIRST).await;
                backoff.reset();
            }
            Err(status) if matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition) => {
                credentials.set_problem(Some(UserProblem::Rejected {
                    user: account.name.clone(),
                    message: status.message().to_owned(),
                }));
                credentials.token.send_replace(Token::Refused);
                pause(credentials, backoff.pause()).await;
            }
            Err(status) => {
                tracing::debug!(code = ?status.code(), message_of_etcd = status.message(), "Authenticate failed");
                tokio::time::sleep(BACKOFF_FIRST).await;
            }
        }
    }
}

/// Waits for `backoff`, or until [`Credentials::look_again`], and requests a token again.
async fn pause(credentials: &Credentials, backoff: Duration) {
    let mut changed = credentials.token.subscribe();
    let looked = changed.wait_for(|token| matches!(token, Token::Wanted));
    let _ = tokio::time::timeout(backoff, looked).await;
    credentials.token.send_replace(Token::Wanted);
}

/// The account's password now. While its file cannot be read, the password that was read at start.
async fn password(account: &Account) -> Secret {
    let Some(file) = account.password_file.clone() else {
        return account.password.clone();
    };
    // On a thread of its own, since reading from a volume may block.
    match tokio::task::spawn_blocking(move || Account::read_password(&file)).await {
        Ok(Ok(password)) => password,
        Ok(Err(error)) => {
            tracing::warn!(%error, "the password cannot be read again; the one read at start is used");
            account.password.clone()
        }
        Err(_) => account.password.clone(),
    }
}

async fn authenticate(account: &Account, connection: &Arc<Connection>) -> Result<Token, tonic::Status> {
    let (channel, origin) = connection.channel();
    let mut client = AuthClient::with_origin(channel, origin);
    let request = AuthenticateRequest {
        name: account.name.clone(),
        password: password(account).await.expose().to_owned(),
    };
    let response = tokio::time::timeout(AUTHENTICATE_TIMEOUT, client.authenticate(request))
        .await
        .map_err(|_| tonic::Status::deadline_exceeded("Authenticate timed out"))?;
    match response {
        Ok(response) => {
            let mut value = HeaderValue::try_from(response.into_inner().token)
                .map_err(|_| tonic::Status::internal("etcd's token cannot be sent as a header"))?;
            value.set_sensitive(true);
            Ok(Token::Have(value))
        }
        Err(status) if status.message().contains("authentication is not enabled") => Ok(Token::None),
        Err(status) => Err(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn refused_login_is_repeated_at_once_after_a_second_look() {
        let credentials = Credentials::new(Some(Account {
            name: "mirror".into(),
            password: Secret::from("wrong".to_owned()),
            password_file: None,
        }));
        let is_wanted = || matches!(*credentials.token.borrow(), Token::Wanted);
        let (started, backoff) = (tokio::time::Instant::now(), BACKOFF_LAST);
        credentials.token.send_replace(Token::Refused);
        let look = async {
            tokio::task::yield_now().await;
            credentials.look_again();
        };
        tokio::join!(pause(&credentials, backoff), look);
        assert!(is_wanted() && started.elapsed() < backoff);
        credentials.token.send_replace(Token::Refused);
        pause(&credentials, backoff).await;
        assert!(is_wanted() && started.elapsed() >= backoff);
        // A token that etcd accepts is kept.
        credentials
            .token
            .send_replace(Token::Have(HeaderValue::from_static("t")));
        credentials.look_again();
        assert!(credentials.have_token());
    }
}
